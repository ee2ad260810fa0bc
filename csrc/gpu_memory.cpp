// A device's cache, and what goes from it to the channels and back.
#include <algorithm>

#include "gpu_device.hpp"

namespace meshweave {
namespace {

constexpr u64 TAG_SHIFT = 60;

// The bin of a time. Bins take memory.
size_t bin_of(i64 at_ps, i64 bin_ps) {
  if (at_ps / bin_ps >= MOST_BINS) throw ProgramFault("the run has more than a million bins of time");
  return static_cast<size_t>(at_ps / bin_ps);
}

}  // namespace

// 256 bytes lie in one channel.
size_t Device::channel_of(u64 line) const {
  const u64 chunk = line / 2, within = by_channels_.quotient(chunk);
  return static_cast<size_t>(by_channels_.rest(chunk + (within ^ (within >> 5) ^ (within >> 10))));
}

void Device::access(const Access& access, i64 now) {
  budget_.spend(1);
  const size_t channel = channel_of(access.line);
  const size_t number = slices_.size() >= channels_.size() ? channel * by_slices_.divisor() + by_slices_.rest(access.line) : channel * slices_.size() / channels_.size();
  Slice& slice = slices_[number];
  if (slice.waiting.empty() && has_room(channel)) return serve(slice, access, now);
  if (slice.waiting.empty()) blocked_.push_back(number);
  slice.waiting.push_back(access);
}

void Device::advance_slices(i64 now) {
  size_t kept = 0;
  for (const size_t number : blocked_) {
    Slice& slice = slices_[number];
    while (!slice.waiting.empty() && has_room(channel_of(slice.waiting.front().line))) {
      const Access access = slice.waiting.front();
      slice.waiting.pop_front();
      serve(slice, access, now);
      if (access.kind == Access::LOAD) end_part_if_loaded(access.of);
    }
    if (!slice.waiting.empty()) blocked_[kept++] = number;
  }
  blocked_.resize(kept);
}

void Device::serve(Slice& slice, const Access& access, i64 now) {
  const i64 at_ps = slice.free_ps = std::max(slice.free_ps, now) + spec_.bank_ps;
  if (access.kind == Access::LOAD) return load(access, at_ps);
  if (access.kind == Access::WRITE) return write_cached(access, at_ps);
  const Tag tag = in_.regions[static_cast<size_t>(access.of)].updates ? Tag::TRACK : Tag::PLAIN;
  memory(COMPUTE, access.line, access.commands, access.kind == Access::UPDATE ? MemoryAccess::UPDATE : MemoryAccess::WRITE, access.source, tag,
         static_cast<u64>(access.of), at_ps + spec_.to_memory_ps);
}

void Device::load(const Access& access, i64 at_ps) {
  const u64 line = access.line;
  Part& of = parts_[static_cast<size_t>(access.of)];
  u32 place = cache_.find(line);
  if (place != Cache::NONE && !cache_.is_pending(place)) {
    ++hits;
    --of.outstanding;
    of.latest_ps = std::max(of.latest_ps, std::max(at_ps, cache_.line(place).ready_ps) + spec_.hit_ps);
    return;
  }
  if (place == Cache::NONE) {
    ++misses;
    place = cache_.victim(line);
    if (place == Cache::NONE)  // all of its set wait for data
      return memory(COMPUTE, line, whole_line(), MemoryAccess::READ, access.source, Tag::LOAD, static_cast<u64>(access.of), at_ps + spec_.to_memory_ps);
    evict(place, at_ps);
    cache_.put(place, line, true);
    memory(COMPUTE, line, whole_line(), MemoryAccess::READ, access.source, Tag::FILL, place, at_ps + spec_.to_memory_ps);
  } else {
    ++hits;
  }
  u32 waiter = free_waiter_;
  if (waiter == Cache::NONE) {
    waiter = static_cast<u32>(waiters_.size());
    waiters_.push_back({});
  } else {
    free_waiter_ = waiters_[waiter].next;
  }
  Cache::Line& waits = cache_.line(place);
  waiters_[waiter] = {static_cast<u32>(access.of), waits.waiters};
  waits.waiters = waiter;
}

void Device::write_cached(const Access& access, i64 at_ps) {
  u32 place = cache_.find(access.line);
  if (place == Cache::NONE) {
    place = cache_.victim(access.line);
    if (place == Cache::NONE)
      return memory(COMPUTE, access.line, whole_line(), MemoryAccess::WRITE, access.source, Tag::PLAIN, 0, at_ps + spec_.to_memory_ps);
    evict(place, at_ps);
    cache_.put(place, access.line, false);
    cache_.line(place).ready_ps = at_ps;
  }
  cache_.line(place).dirty = true;
  cache_.line(place).source = static_cast<u16>(access.source);
}

void Device::evict(u32 place, i64 now) {
  const Cache::Line& line = cache_.line(place);
  if (line.dirty)
    memory(COMPUTE, cache_.number(place), whole_line(), MemoryAccess::WRITE, line.source, Tag::PLAIN, 0, now + spec_.to_memory_ps);
}

// Puts a request for column commands of a line in a stream of its channel. 256 bytes after 256 bytes of a channel lie in one and the other
// of two banks until their rows are full; then come the next two (Accel-Sim's SM7_QV100, gpgpu_mem_addr_mapping).
void Device::memory(i64 stream, u64 line, i64 commands, MemoryAccess access, i64 source, Tag tag, u64 payload, i64 at_ps) {
  budget_.spend(1);
  const size_t channel = channel_of(line);
  const u64 within = by_channels_.quotient(line / 2), banks = static_cast<u64>(in_.timing.banks);
  const u64 pairs = by_row_.quotient(within / 2), bank_pair = by_bank_pairs_.rest(pairs), row = by_bank_pairs_.quotient(pairs);
  const u64 bank_number = banks == 1 ? 0 : 2 * bank_pair + within % 2;
  i64& last = last_arrival_[2 * channel + static_cast<size_t>(stream)];
  last = std::max(last, blocks_of(at_ps, spec_.memory_ps));
  channels_[channel].push(stream, {last, static_cast<u32>(bank_number), static_cast<u32>(row), static_cast<u32>(commands), access,
                                   static_cast<u32>(source), (static_cast<u64>(tag) << TAG_SHIFT) | payload});
  traffic[static_cast<size_t>(source)] += commands;
  const size_t bin = bin_of(at_ps, spec_.bin_ps) * NUM_SOURCES + static_cast<size_t>(source);
  if (bin >= bins.size()) bins.resize((bin / NUM_SOURCES + 1) * NUM_SOURCES, 0);
  bins[bin] += commands;
}

void Device::run_channels(i64 end_ps) {
  budget_.spend(spec_.channels);
  const i64 end = blocks_of(end_ps, spec_.memory_ps);
  const Totals before = totals();
  for (Channel& channel : channels_) {
    memory_events_.clear();
    channel.run(end, memory_events_);
    for (const MemoryEvent& event : memory_events_) {
      const Tag tag = static_cast<Tag>(event.tag >> TAG_SHIFT);
      const i64 payload = static_cast<i64>(event.tag & ((u64{1} << TAG_SHIFT) - 1)), at_ps = event.cycle * spec_.memory_ps;
      if (!event.is_done) {
        if (tag == Tag::TRACK) track(payload, at_ps);
        continue;
      }
      const i64 back_ps = at_ps + spec_.from_memory_ps;
      const auto give = [&](i64 part) {
        Part& of = parts_[static_cast<size_t>(part)];
        --of.outstanding;
        of.latest_ps = std::max(of.latest_ps, back_ps);
        end_part_if_loaded(part);
      };
      if (tag == Tag::LOAD) give(payload);
      if (tag == Tag::DMA && --dma_left_[static_cast<size_t>(payload)] == 0) push(back_ps, What::DMA_READ, payload);
      if (tag != Tag::FILL) continue;
      Cache::Line& line = cache_.line(static_cast<u32>(payload));
      cache_.set_ready(static_cast<u32>(payload), back_ps);
      for (u32 waiter = line.waiters; waiter != Cache::NONE;) {
        const Waiter known = waiters_[waiter];
        give(known.part);
        waiters_[waiter].next = free_waiter_;
        free_waiter_ = waiter;
        waiter = known.next;
      }
      line.waiters = Cache::NONE;
    }
  }
  const size_t bin = bin_of(end_ps - 1, spec_.bin_ps);
  if (bin >= occupancy.size()) {
    occupancy.resize(bin + 1, 0);
    waits.resize(3 * occupancy.size(), 0);
  }
  const Totals after = totals();
  occupancy[bin] += after.occupancy - before.occupancy;
  waits[3 * bin] += after.held_cycles - before.held_cycles;
  waits[3 * bin + 1] += after.compute_behind - before.compute_behind;
  waits[3 * bin + 2] += after.communication_behind - before.communication_behind;
}

}  // namespace meshweave
