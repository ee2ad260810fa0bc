// Amounts that share resources: max-min fair rates in integers, as in the reference (`simulate/flows.py`).
//
// A resource whose flows could all run at their caps at once never limits anybody; nor does any resource limit a flow
// whose cap is below an equal share of it. Only the others tie flows together, so most start and end without a look at
// any other; that is what makes large pods cheap. The rates are the same as without these short cuts.
#pragma once

#include <array>
#include <span>
#include <vector>

#include "error.hpp"
#include "queue.hpp"

namespace meshweave {

constexpr i64 PS_PER_S = 1'000'000'000'000;
constexpr i64 LAST_PS = i64{1} << 62;  // later is beyond what a run can mean

// What to do when a flow starts or ends: the engine's business.
struct Purpose {
  u32 role = 0, x = 0, y = 0, z = 0;
};

struct Use {
  u32 resource, weight;
};

class Flows {
 public:
  Flows(std::vector<i64> capacities, Queue& queue);

  // A flow to be started later by start(); `amount` in bytes or FLOPs, `cap` in them per second.
  u32 make(i64 amount, i64 cap, const std::vector<Use>& uses, Purpose purpose);
  // Whether it is over at once, because there is nothing to move.
  bool start(u32 flow, i64 now_ps);
  bool is_current(Event event) const { return flows_[event.flow].version == event.version; }
  void end(u32 flow);   // takes it off its resources
  void drop(u32 flow);  // its number may be used again
  const Purpose& purpose(u32 flow) const { return flows_[flow].purpose; }
  // Shares rates anew among the flows that this instant has touched, and schedules their ends.
  void share(i64 now_ps);

  const std::vector<u64>& carried() const { return carried_; }  // amount x weight by resource

 private:
  struct Entry {
    u32 resource, weight, place;  // place in the resource's list
  };
  struct Flow {
    u128 left = 0;  // amount x ps per s
    i64 amount = 0, since_ps = 0;
    u64 rate = 0, cap = 0;
    u32 version = 1;
    u32 visited = 0;  // number of the sharing that last met it
    Purpose purpose;
    // What it uses: a message to a neighbour fits in here; a longer route goes to `more`, all of it.
    std::array<Entry, 4> few{};
    u32 num_few = 0;
    std::vector<Entry> more;

    std::span<Entry> entries() { return more.empty() ? std::span<Entry>(few.data(), num_few) : std::span<Entry>(more); }
  };
  struct Member {
    u32 flow, entry;
  };
  struct Resource {
    u64 capacity = 0;
    u128 demand = 0;  // of all its flows at their caps
    std::vector<Member> members;
    u32 visited = 0, touched = 0;
    u64 weight = 0;             // of all its flows
    u64 left = 0, open = 0;     // while sharing: what is left, and the weight of those who share it

    bool binds() const { return demand > capacity; }
  };

  static void add(Flow& flow, Use use);
  // Whether it reaches its cap whatever the others do: an equal share of each resource that binds is enough for it.
  bool is_safe(Flow& flow) const;
  void settle(u32 flow, i64 now_ps);
  void visit(u32 resource);
  // Shares a resource that binds, and all that are tied to it by flows that are not safe.
  void share_from(u32 resource, i64 now_ps);
  static void take(Resource& resource, u64 used);
  void set_rate(u32 flow, u64 rate, i64 now_ps);

  Queue& queue_;
  std::vector<Flow> flows_;
  std::vector<u32> free_;
  std::vector<Resource> resources_;
  std::vector<u64> carried_;
  std::vector<u32> fresh_;    // started in this instant
  std::vector<u32> loosened_;  // resources that bound before a flow of theirs ended
  u32 round_ = 0;
  std::vector<u32> open_, tied_;  // scratch
  // The last quotient: in a regular program most flows are alike.
  i64 memo_amount_ = -1, memo_ps_ = 0;
  u64 memo_rate_ = 0;
};

}  // namespace meshweave
