// A collective in progress: which of its messages may begin, and the size, route and rate of each.
#pragma once

#include <memory>

#include "machine.hpp"
#include "steps.hpp"

namespace meshweave {

constexpr u32 NOBODY = UINT32_MAX;

struct Message {
  i64 after_ps = 0;  // launch and synchronisation, before the first byte
  i64 bytes = 0, cap = 1;
  i64 source = 0, target = 0;  // positions of ranks
  Machine::Span route{0, 0};
  bool adds = false;  // the receiver adds the elements to its own
};

// Returns the kind of communication whose constants an op uses.
Comm comm_of(const OpRow& row);

// Returns the constants of a collective: those of its size, where the machine prices it by that, else of its axis.
Constants constants_of(const Expanded& program, const Machine& machine, i64 group, const Class& in, const ClassOp& of);

// Only the first step of a lowered collective pays its launch.
inline i64 launch_of(const ClassOp& of, const Constants& constants) { return of.step > 0 ? 0 : constants.launch_ps; }

// An all-gather, reduce-scatter, all-reduce, all-to-all, broadcast or reduce of at least two members.
class Collective {
 public:
  // `of` is the op of the first member to arrive; all members agree in the fields that are read.
  Collective(const Expanded& program, const Machine& machine, i64 group, i64 rank, const ClassOp& of);

  bool is_over() const { return ended_ == count_; }

  // A member issues its op. begin(Message, direction, member or hop) is called for each message that may begin.
  template <class Begin>
  void arrive(i64 place, u32 op, const ClassOp& of, Begin begin) {
    ops_[static_cast<size_t>(place)] = op;
    if (!own_.empty()) own_[static_cast<size_t>(place)] = &of;
    if (chain_) {
      chain_->arrive(floor_mod(place - first_, count_), [&](i64 hop, i64 packet) { begin(hop_message(hop, packet), 0, hop); });
    } else {
      ring_->arrive(place, [&](i64 direction, i64 step, i64 member) { begin(step_message(direction, step, member), direction, member); });
    }
  }

  // Ends a message. done(op) is called for each op that this completes.
  template <class Begin, class Done>
  void over(i64 direction, i64 member, Begin begin, Done done) {
    if (chain_) {
      chain_->over(member, [&](i64 hop, i64 packet) { begin(hop_message(hop, packet), 0, hop); },
                   [&](i64 place) { ++ended_, done(ops_[static_cast<size_t>(at_place(place))]); });
    } else {
      ring_->over(direction, member, [&](i64 w, i64 step, i64 m) { begin(step_message(w, step, m), w, m); },
                  [&](i64 m) { ++ended_, done(ops_[static_cast<size_t>(m)]); });
    }
  }

 private:
  i64 at_place(i64 place) const {
    const i64 member = first_ + place;
    return member >= count_ ? member - count_ : member;
  }
  // Returns the bytes of a member's part that travel in one direction.
  i64 part_bytes(const ClassOp& of, const Class& in, i64 part, i64 direction) const;
  Message step_message(i64 direction, i64 step, i64 member) const;
  Message hop_message(i64 hop, i64 packet) const;

  const Expanded& program_;
  const Machine& machine_;
  i64 group_start_;  // in Template::members
  Kind kind_;
  Constants constants_;
  i64 count_, full_count_, num_directions_ = 1, first_ = 0, ended_ = 0;
  const i64* ranks_;  // of the members
  const ClassOp& of_;
  const Class& in_;
  i64 direction_bytes_[2] = {-1, -1};  // if all parts have the same size
  i64 cap_ = 1;
  std::vector<u32> ops_;  // by place in the group
  std::vector<const ClassOp*> own_;  // likewise, of an all-to-all: each member cuts its own
  std::unique_ptr<RingSteps> ring_;
  std::unique_ptr<ChainSteps> chain_;
};

}  // namespace meshweave
