#include "flows.hpp"

#include <algorithm>

namespace meshweave {

Flows::Flows(std::vector<i64> capacities, Queue& queue) : queue_(queue), carried_(capacities.size(), 0) {
  resources_.resize(capacities.size());
  for (size_t at = 0; at < capacities.size(); ++at) {
    require(capacities[at] >= 1, "machine: a resource without a rate");
    resources_[at].capacity = static_cast<u64>(capacities[at]);
  }
}

void Flows::add(Flow& flow, Use use) {
  for (Entry& entry : flow.entries())
    if (entry.resource == use.resource) {
      entry.weight += use.weight;
      return;
    }
  const Entry entry{use.resource, use.weight, 0};
  if (flow.more.empty() && flow.num_few < flow.few.size()) {
    flow.few[flow.num_few++] = entry;
  } else {
    if (flow.more.empty()) flow.more.assign(flow.few.begin(), flow.few.end());
    flow.more.push_back(entry);
  }
}

u32 Flows::make(i64 amount, i64 cap, const std::vector<Use>& uses, Purpose purpose) {
  u32 number;
  if (free_.empty()) {
    number = static_cast<u32>(flows_.size());
    flows_.emplace_back();
  } else {
    number = free_.back();
    free_.pop_back();
  }
  Flow& flow = flows_[number];
  flow.amount = amount;
  flow.left = static_cast<u128>(amount) * static_cast<u128>(PS_PER_S);
  flow.rate = 0;
  flow.cap = static_cast<u64>(std::max<i64>(cap, 1));
  flow.purpose = purpose;
  flow.num_few = 0;
  flow.more.clear();
  for (const Use& use : uses) add(flow, use);
  // More than a resource alone could give it, it never gets.
  for (const Entry& entry : flow.entries()) {
    const u64 capacity = resources_[entry.resource].capacity;
    flow.cap = std::min(flow.cap, entry.weight == 1 ? capacity : std::max<u64>(capacity / entry.weight, 1));
  }
  return number;
}

bool Flows::start(u32 number, i64 now_ps) {
  Flow& flow = flows_[number];
  if (flow.amount == 0) return true;
  flow.since_ps = now_ps;
  const auto entries = flow.entries();
  for (u32 at = 0; at < entries.size(); ++at) {
    Entry& entry = entries[at];
    Resource& resource = resources_[entry.resource];
    entry.place = static_cast<u32>(resource.members.size());
    resource.members.push_back({number, at});
    resource.demand += static_cast<u128>(flow.cap) * entry.weight;
    resource.weight += entry.weight;
  }
  fresh_.push_back(number);
  return false;
}

void Flows::end(u32 number) {
  Flow& flow = flows_[number];
  for (const Entry& entry : flow.entries()) {
    Resource& resource = resources_[entry.resource];
    if (resource.binds() && !resource.touched) {
      resource.touched = 1;
      loosened_.push_back(entry.resource);
    }
    resource.demand -= static_cast<u128>(flow.cap) * entry.weight;
    resource.weight -= entry.weight;
    const Member last = resource.members.back();
    resource.members[entry.place] = last;
    flows_[last.flow].entries()[last.entry].place = entry.place;
    resource.members.pop_back();
    carried_[entry.resource] += static_cast<u64>(flow.amount) * entry.weight;
  }
}

void Flows::drop(u32 number) {
  if (++flows_[number].version == 0) flows_[number].version = 1;  // 0 says that a flow starts
  free_.push_back(number);
}

void Flows::share(i64 now_ps) {
  if (fresh_.empty() && loosened_.empty()) return;
  if (++round_ == 0) {  // the numbers are used up: forget all visits
    for (Flow& flow : flows_) flow.visited = 0;
    for (Resource& resource : resources_) resource.visited = 0;
    round_ = 1;
  }
  for (const u32 number : loosened_) {
    Resource& resource = resources_[number];
    resource.touched = 0;
    if (resource.binds()) {
      share_from(number, now_ps);
    } else {
      for (const Member& member : resource.members) settle(member.flow, now_ps);
    }
  }
  loosened_.clear();
  for (const u32 number : fresh_) settle(number, now_ps);
  fresh_.clear();
}

bool Flows::is_safe(Flow& flow) const {
  for (const Entry& entry : flow.entries()) {
    const Resource& resource = resources_[entry.resource];
    if (resource.binds() && static_cast<u128>(flow.cap) * resource.weight > resource.capacity) return false;
  }
  return true;
}

void Flows::settle(u32 number, i64 now_ps) {
  Flow& flow = flows_[number];
  if (flow.rate == flow.cap || flow.visited == round_) return;
  bool is_tied = false;
  for (const Entry& entry : flow.entries())
    if (resources_[entry.resource].binds()) {
      is_tied = true;
      share_from(entry.resource, now_ps);
    }
  if (!is_tied) set_rate(number, flow.cap, now_ps);
}

void Flows::visit(u32 number) {
  Resource& resource = resources_[number];
  if (resource.visited == round_ || !resource.binds()) return;
  resource.visited = round_;
  resource.left = resource.capacity;
  tied_.push_back(number);
}

void Flows::share_from(u32 seed, i64 now_ps) {
  tied_.clear();
  open_.clear();
  visit(seed);
  for (size_t at = 0; at < tied_.size(); ++at) {
    const u32 number = tied_[at];
    for (const Member& member : resources_[number].members) {
      Flow& flow = flows_[member.flow];
      if (flow.visited == round_) continue;
      flow.visited = round_;
      const bool safe = is_safe(flow);
      if (!safe) open_.push_back(member.flow);
      // A safe flow ties nobody together, except when it has been slower until now.
      if (!safe || flow.rate != flow.cap)
        for (const Entry& entry : flow.entries()) visit(entry.resource);
      if (safe) set_rate(member.flow, flow.cap, now_ps);
    }
  }
  for (const u32 number : tied_) {
    Resource& resource = resources_[number];
    for (const Member& member : resource.members) {
      Flow& flow = flows_[member.flow];
      if (flow.rate == flow.cap && is_safe(flow)) take(resource, flow.cap * flow.entries()[member.entry].weight);
    }
  }
  // Progressive filling: who wants least gets it; else the tightest resources are given away in equal shares.
  while (!open_.empty()) {
    for (const u32 number : tied_) resources_[number].open = 0;
    for (const u32 number : open_)
      for (const Entry& entry : flows_[number].entries()) resources_[entry.resource].open += entry.weight;
    u64 share = UINT64_MAX;
    for (const u32 number : tied_) {
      const Resource& resource = resources_[number];
      if (resource.open) share = std::min(share, resource.left / resource.open);
    }
    const auto is_tight = [&](const Entry& entry) {
      const Resource& resource = resources_[entry.resource];
      return resource.visited == round_ && resource.left / resource.open <= share;
    };
    const bool any_capped =
        std::any_of(open_.begin(), open_.end(), [&](u32 number) { return flows_[number].cap <= share; });
    // Decide first, then give away: who is chosen must not depend on the order.
    const auto split = std::stable_partition(open_.begin(), open_.end(), [&](u32 number) {
      Flow& flow = flows_[number];
      if (any_capped) return flow.cap > share;
      const auto entries = flow.entries();
      return std::none_of(entries.begin(), entries.end(), is_tight);
    });
    for (auto at = split; at != open_.end(); ++at) {
      Flow& flow = flows_[*at];
      const u64 rate = std::max<u64>(std::min(flow.cap, share), 1);
      for (const Entry& entry : flow.entries())
        if (resources_[entry.resource].visited == round_) take(resources_[entry.resource], rate * entry.weight);
      set_rate(*at, rate, now_ps);
    }
    open_.erase(split, open_.end());
  }
}

void Flows::take(Resource& resource, u64 used) { resource.left = resource.left > used ? resource.left - used : 0; }

void Flows::set_rate(u32 number, u64 rate, i64 now_ps) {
  Flow& flow = flows_[number];
  if (rate == flow.rate) return;
  u128 duration;
  if (flow.rate == 0 && flow.amount == memo_amount_ && rate == memo_rate_) {
    duration = static_cast<u128>(memo_ps_);
  } else {
    const u128 done = static_cast<u128>(flow.rate) * static_cast<u128>(now_ps - flow.since_ps);
    flow.left = flow.left > done ? flow.left - done : 0;
    if (flow.left <= UINT64_MAX) {
      const auto left = static_cast<u64>(flow.left);
      duration = left / rate + (left % rate != 0);
    } else {
      duration = (flow.left + rate - 1) / rate;
    }
    if (duration > static_cast<u128>(LAST_PS - now_ps)) throw ProgramFault("the run takes longer than 53 days");
    if (flow.rate == 0) {
      memo_amount_ = flow.amount;
      memo_rate_ = rate;
      memo_ps_ = static_cast<i64>(duration);
    }
  }
  if (duration > static_cast<u128>(LAST_PS - now_ps)) throw ProgramFault("the run takes longer than 53 days");
  flow.since_ps = now_ps;
  flow.rate = rate;
  if (++flow.version == 0) flow.version = 1;
  queue_.push(now_ps + static_cast<i64>(duration), {number, flow.version});
}

}  // namespace meshweave
