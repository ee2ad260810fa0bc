// Flows that share resources: max-min fair rates in integers, as in the reference (`tests/plain_simulator/flows.py`).
//
// A resource limits no flow if all its flows can run at their caps at once. It also does not limit a flow whose cap is
// below an equal share of it. Rates are computed jointly only for flows that share a resource which does limit them, so
// that most flows start and end without a visit to any other. The rates equal those of the full computation.
#pragma once

#include <array>
#include <span>
#include <vector>

#include "error.hpp"
#include "queue.hpp"

namespace meshweave {

constexpr i64 PS_PER_S = 1'000'000'000'000;
constexpr i64 LAST_PS = i64{1} << 62;  // the latest time that a run may reach

// The action of the engine when a flow starts or ends.
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
  // Starts a flow. Returns whether it ends at once, because its amount is 0.
  bool start(u32 flow, i64 now_ps);
  bool is_current(Event event) const { return flows_[event.flow].version == event.version; }
  void end(u32 flow);   // removes it from its resources
  void drop(u32 flow);  // its number may be used again
  const Purpose& purpose(u32 flow) const { return flows_[flow].purpose; }
  // Computes the rates anew of flows affected by starts and ends in this instant, and schedules their ends.
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
    u32 visited = 0;  // number of the last share() that visited it
    Purpose purpose;
    // Its resources: up to four are in `few` (a message to a neighbour), more of them all in `more`.
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
    u64 left = 0, open = 0;     // in share(): the capacity left, and the weight of the flows without a rate

    bool binds() const { return demand > capacity; }
  };

  static void add(Flow& flow, Use use);
  // Returns whether it reaches its cap in any case: an equal share of each binding resource suffices.
  bool is_safe(Flow& flow) const;
  void settle(u32 flow, i64 now_ps);
  void visit(u32 resource);
  // Computes the rates on a binding resource and on all resources connected to it by flows that are not safe.
  void share_from(u32 resource, i64 now_ps);
  static void take(Resource& resource, u64 used);
  void set_rate(u32 flow, u64 rate, i64 now_ps);

  Queue& queue_;
  std::vector<Flow> flows_;
  std::vector<u32> free_;
  std::vector<Resource> resources_;
  std::vector<u64> carried_;
  std::vector<u32> fresh_;    // started in this instant
  std::vector<u32> loosened_;  // resources that were binding before one of their flows ended
  u32 round_ = 0;
  std::vector<u32> open_, tied_;  // scratch
  // A cache of the last division: in a regular program most flows have equal amounts and rates.
  i64 memo_amount_ = -1, memo_ps_ = 0;
  u64 memo_rate_ = 0;
};

}  // namespace meshweave
