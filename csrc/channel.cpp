#include "channel.hpp"

#include <algorithm>

namespace meshweave {

Channel::Channel(const DramTiming& timing, const Controller& controller)
    : timing_(timing),
      controller_(controller),
      entries_(static_cast<size_t>(controller.queue)),
      banks_(static_cast<size_t>(timing.banks)),
      group_ready_(static_cast<size_t>(timing.groups), 0) {
  for (i64 slot = controller.queue - 1; slot >= 0; --slot) free_.push_back(static_cast<u8>(slot));
}

void Channel::push(i64 stream, const Request& request) { streams_[stream].push_back(request); }

void Channel::run(i64 end, std::vector<MemoryEvent>& out) {
  while (now_ < end) {
    if (empty()) {
      now_ = end;
      return;
    }
    const i64 in_queue = queued_;
    const bool moved = column(now_, out);
    const bool opened = row(now_);
    const bool entered = arbitrate(now_, out);
    const i64 next = moved || opened || entered ? now_ + 1 : std::min(wake(now_), end);
    busy_ += in_queue > 0 ? next - now_ : 0;
    occupancy_ += in_queue * (next - now_);
    counters_.held_cycles += held_ ? next - now_ : 0;
    now_ = next;
  }
}

bool Channel::column(i64 now, std::vector<MemoryEvent>& out) {
  if (any_ready_ > now || column_retry_ > now) return false;
  bool writes = writes_;
  if (hits_[writes].empty() || (run_ >= controller_.turn_limit && !hits_[!writes].empty())) writes = !writes;
  if (direction_ready_[writes] > now) return false;
  Slots& hits = hits_[writes];
  i64 retry = INT64_MAX;
  for (size_t at = 0; at < hits.size(); ++at) {
    Request& request = entries_[hits[at]].request;
    Bank& bank = banks_[request.bank];
    i64& group_ready = group_ready_[request.bank % static_cast<u32>(timing_.groups)];
    if (const i64 ready = std::max(bank.column, group_ready); ready > now) {
      retry = std::min(retry, ready);
      continue;
    }
    if (writes != writes_) {
      writes_ = writes;
      run_ = 0;
      ++counters_.turns;
    }
    ++run_;
    ++counters_.column_commands;
    --queued_;
    any_ready_ = now + timing_.ccd;
    group_ready = now + (request.access == MemoryAccess::UPDATE ? timing_.ccdwl : timing_.ccdl);
    if (writes) {
      direction_ready_[0] = now + timing_.wl + timing_.ccd + timing_.wtr;
      bank.close = std::max(bank.close, now + timing_.wl + timing_.ccd + timing_.wr);
    } else {
      direction_ready_[1] = std::max(direction_ready_[1], now + timing_.cl + timing_.ccd + 1 - timing_.wl);
      bank.close = std::max(bank.close, now + timing_.rtp);
    }
    if (--request.commands == 0) {
      out.push_back({now + (writes ? timing_.wl : timing_.cl) + timing_.ccd, true, request.access, request.tag});
      free_.push_back(hits[at]);
      hits.erase(hits.begin() + static_cast<std::ptrdiff_t>(at));
      if (--bank.hits == 0)
        row_retry_ = now;
      else if (!misses_.empty())  // which may be the oldest now
        row_retry_ = std::min(row_retry_, entries_[misses_.front()].entered + controller_.age_limit + 1);
    }
    return true;
  }
  column_retry_ = retry;
  return false;
}

bool Channel::row(i64 now) {
  if (misses_.empty() || row_retry_ > now) return false;
  u64 seen = 0;  // banks for which an older request has been looked at
  i64 retry = INT64_MAX;
  const auto oldest = [&](const Slots& slots) { return slots.empty() ? UINT64_MAX : entries_[slots.front()].age; };
  const bool is_first = oldest(misses_) < std::min(oldest(hits_[0]), oldest(hits_[1]));
  for (size_t at = 0; at < misses_.size(); ++at) {
    const Entry& entry = entries_[misses_[at]];
    const u64 bit = u64{1} << entry.request.bank;
    if (seen & bit) continue;
    seen |= bit;
    const Bank& bank = banks_[entry.request.bank];
    if (bank.row < 0) {
      const i64 from = std::max(bank.open, open_ready_);
      if (from <= now) {
        open(entry.request.bank, entry.request.row, now);
        return true;
      }
      retry = std::min(retry, from);
      continue;
    }
    const i64 overdue = at == 0 && is_first ? entry.entered + controller_.age_limit + 1 : INT64_MAX;
    if (bank.hits > 0 && overdue > now) {
      retry = std::min(retry, overdue);
      continue;
    }
    if (bank.close <= now) {
      close(entry.request.bank, now);
      return true;
    }
    retry = std::min(retry, bank.close);
  }
  row_retry_ = retry;
  return false;
}

void Channel::open(u32 number, u32 row, i64 now) {
  column_retry_ = now;
  Bank& bank = banks_[number];
  bank.row = row;
  bank.column = now + timing_.rcd;
  bank.close = now + timing_.ras;
  bank.open = now + timing_.rc;
  open_ready_ = now + timing_.rrd;
  ++counters_.activates;
  size_t kept = 0;
  for (const u8 slot : misses_) {
    const Entry& entry = entries_[slot];
    if (entry.request.bank == number && entry.request.row == row) {
      insert(hits_[writes_of(entry)], slot);
      ++bank.hits;
    } else {
      misses_[kept++] = slot;
    }
  }
  misses_.resize(kept);
}

void Channel::close(u32 number, i64 now) {
  column_retry_ = now;
  Bank& bank = banks_[number];
  for (Slots* hits : {&hits_[0], &hits_[1]}) {
    if (bank.hits == 0) break;
    size_t kept = 0;
    for (const u8 slot : *hits)
      if (entries_[slot].request.bank == number)
        insert(misses_, slot);
      else
        (*hits)[kept++] = slot;
    hits->resize(kept);
  }
  bank.hits = 0;
  bank.row = -1;
  bank.open = std::max(bank.open, now + timing_.rp);
}

void Channel::insert(Slots& slots, u8 slot) {
  const auto older = [&](u8 one, u8 other) { return entries_[one].age < entries_[other].age; };
  slots.insert(std::upper_bound(slots.begin(), slots.end(), slot, older), slot);
}

i64 Channel::choose_stream(i64 now) {
  const bool compute = is_ready(COMPUTE, now), communication = is_ready(COMMUNICATION, now);
  switch (controller_.policy) {
    case Policy::ROUND_ROBIN:
      if (compute && communication) return 1 - last_stream_;
      return compute ? COMPUTE : communication ? COMMUNICATION : -1;
    case Policy::COMPUTE_FIRST:
      return compute ? COMPUTE : communication ? COMMUNICATION : -1;
    case Policy::COMMUNICATION_AWARE:
      break;
  }
  if (communication && now - std::max(last_communication_, streams_[COMMUNICATION].front().arrival) > controller_.starvation)
    return COMMUNICATION;
  if (compute) return COMPUTE;
  if (communication && queued_ < controller_.threshold) return COMMUNICATION;
  held_ = communication;
  return -1;
}

bool Channel::arbitrate(i64 now, std::vector<MemoryEvent>& out) {
  held_ = false;
  if (queued_ >= controller_.queue) return false;
  const i64 stream = choose_stream(now);
  if (stream < 0) return false;
  const Request request = streams_[stream].front();
  if (queued_ > 0 && queued_ + request.commands > controller_.queue) return false;
  queued_ += request.commands;
  streams_[stream].pop_front();
  last_stream_ = stream;
  counters_.behind_other[1 - stream] += is_ready(1 - stream, now);
  if (stream == COMMUNICATION) last_communication_ = now;
  Bank& bank = banks_[request.bank];
  const u8 slot = free_.back();
  free_.pop_back();
  entries_[slot] = {request, now, ages_++};
  if (bank.row == static_cast<i64>(request.row)) {
    ++bank.hits;
    hits_[writes_of(entries_[slot])].push_back(slot);
    column_retry_ = now;
  } else {
    misses_.push_back(slot);
    row_retry_ = now;
  }
  out.push_back({now, false, request.access, request.tag});
  return true;
}

// A cycle after `now` before which nothing can happen, given that nothing happened in `now`.
i64 Channel::wake(i64 now) const {
  i64 next = INT64_MAX;
  const auto consider = [&](i64 at) {
    if (at > now) next = std::min(next, at);
  };
  if (!hits_[0].empty() || !hits_[1].empty()) {
    const i64 first = std::max(any_ready_, column_retry_);
    first > now ? consider(first) : (consider(direction_ready_[0]), consider(direction_ready_[1]));
  }
  if (!misses_.empty()) consider(row_retry_);
  if (queued_ >= controller_.queue) return next;
  for (const auto& stream : streams_)
    if (!stream.empty()) consider(stream.front().arrival);
  if (!streams_[COMMUNICATION].empty())
    consider(std::max(last_communication_, streams_[COMMUNICATION].front().arrival) + controller_.starvation + 1);
  return next;
}

}  // namespace meshweave
