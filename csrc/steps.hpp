// Collectives as messages: the steps of a ring, and the packets of a chain (broadcast, reduce). These classes decide
// which message may begin; the engine computes how long it takes.
#pragma once

#include <vector>

#include "error.hpp"

namespace meshweave {

// Each member sends and receives one message per step, independently in each direction. The message of step t between
// two members begins when both are at step t; a member is at step t + 1 when both its messages of step t are over.
class RingSteps {
 public:
  RingSteps(i64 count, i64 steps, i64 directions, bool widening)
      : count_(count), steps_(steps), directions_(directions), widening_(widening),
        here_(static_cast<size_t>(count), 0),
        left_(static_cast<size_t>(count), static_cast<unsigned char>(directions)),
        at_(static_cast<size_t>(count * directions), 0), open_(static_cast<size_t>(count * directions), 2) {}

  // Returns the member to which a member sends in a step: its neighbour, or in an all-to-all member + step + 1.
  i64 receiver(i64 direction, i64 step, i64 member) const {
    if (widening_) return (member + step + 1) % count_;
    return direction == 0 ? (member + 1 == count_ ? 0 : member + 1) : (member ? member - 1 : count_ - 1);
  }
  i64 sender(i64 direction, i64 step, i64 member) const {
    if (widening_) return (member + count_ - step - 1) % count_;
    return receiver(1 - direction, step, member);
  }

  // begin(direction, step, member) is called for each message that may begin now.
  template <class Begin>
  void arrive(i64 member, Begin begin) {
    here_[static_cast<size_t>(member)] = 1;
    for (i64 direction = 0; direction < directions_; ++direction) offer(direction, member, begin);
  }

  // Ends the message that `member` sent. done(member) is called for each member whose last message this was.
  template <class Begin, class Done>
  void over(i64 direction, i64 member, Begin begin, Done done) {
    const i64 other = receiver(direction, at_[place(direction, member)], member);
    close(direction, member, begin, done);
    close(direction, other, begin, done);
  }

 private:
  size_t place(i64 direction, i64 member) const { return static_cast<size_t>(direction * count_ + member); }

  template <class Begin, class Done>
  void close(i64 direction, i64 member, Begin& begin, Done& done) {
    const size_t at = place(direction, member);
    if (--open_[at]) return;
    open_[at] = 2;
    if (++at_[at] < static_cast<u32>(steps_)) {
      offer(direction, member, begin);
    } else if (--left_[static_cast<size_t>(member)] == 0) {
      done(member);
    }
  }

  template <class Begin>
  void offer(i64 direction, i64 member, Begin& begin) {
    const u32 step = at_[place(direction, member)];
    const i64 to = receiver(direction, step, member), from = sender(direction, step, member);
    if (here_[static_cast<size_t>(to)] && at_[place(direction, to)] == step) begin(direction, static_cast<i64>(step), member);
    if (from != member && here_[static_cast<size_t>(from)] && at_[place(direction, from)] == step)
      begin(direction, static_cast<i64>(step), from);
  }

  i64 count_, steps_, directions_;
  bool widening_;
  std::vector<unsigned char> here_, left_;
  std::vector<u32> at_;
  std::vector<unsigned char> open_;
};

// Packets run from place 0 to place count - 1. Packet d makes hop h once it has made hop h - 1, packet d - 1 has made
// hop h, and both ends of the hop are there.
class ChainSteps {
 public:
  ChainSteps(i64 count, i64 packets)
      : packets_(packets), here_(static_cast<size_t>(count), 0), made_(static_cast<size_t>(count - 1), 0),
        busy_(static_cast<size_t>(count - 1), 0) {}

  // begin(hop, packet) is called for each message that may begin now.
  template <class Begin>
  void arrive(i64 place, Begin begin) {
    here_[static_cast<size_t>(place)] = 1;
    if (place > 0) offer(place - 1, begin);
    if (place < last()) offer(place, begin);
  }

  // Ends the packet that is on a hop. done(place) is called for each place whose last packet this was.
  template <class Begin, class Done>
  void over(i64 hop, Begin begin, Done done) {
    busy_[static_cast<size_t>(hop)] = 0;
    const i64 made = ++made_[static_cast<size_t>(hop)];
    if (made == packets_) {
      done(hop);
      if (hop + 1 == last()) done(hop + 1);
    }
    offer(hop, begin);
    if (hop + 1 < last()) offer(hop + 1, begin);
  }

 private:
  i64 last() const { return static_cast<i64>(made_.size()); }

  template <class Begin>
  void offer(i64 hop, Begin& begin) {
    const auto at = static_cast<size_t>(hop);
    const i64 packet = made_[at];
    if (busy_[at] || packet == packets_ || !here_[at] || !here_[at + 1]) return;
    if (hop > 0 && made_[at - 1] <= packet) return;
    busy_[at] = 1;
    begin(hop, packet);
  }

  i64 packets_;
  std::vector<unsigned char> here_;
  std::vector<i64> made_;
  std::vector<unsigned char> busy_;
};

}  // namespace meshweave
