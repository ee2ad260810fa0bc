// A device's link to the next one, its tracker, and the DMA engine that the tracker triggers.
#include <algorithm>

#include "gpu_device.hpp"

namespace meshweave {
namespace {

constexpr i64 PACKET_LINES = 16;

}  // namespace

void Device::send(const Region& from, i64 to, i64 peer, bool updates, i64 now, i64& sent_ps) {
  if (peer >= static_cast<i64>(link_free_.size())) link_free_.resize(static_cast<size_t>(peer) + 1, 0);
  i64& link_free_ps = link_free_[static_cast<size_t>(peer)];
  Device& next = *peers_[static_cast<size_t>(peer) % peers_.size()];
  const i64 bytes = from.rows * from.row_bytes, start = std::max(link_free_ps, now);
  const i64 took = time_ps(bytes, spec_.link_bytes_per_s);
  link_free_ps = sent_ps = start + took;
  sent_bytes += bytes;
  const i64 packets = blocks_of(next.tracked_[static_cast<size_t>(to)].lines, PACKET_LINES);
  for (i64 packet = 0; packet < packets; ++packet)
    next.push(start + took * (packet + 1) / packets + spec_.link_ps, What::ARRIVE, to, 2 * packet + updates);
}

void Device::arrive(i64 region, i64 packet, i64 now) {
  const Region& to = in_.regions[static_cast<size_t>(region)];
  budget_.spend(tracked_[static_cast<size_t>(region)].lines / PACKET_LINES);
  const i64 first = packet / 2 * PACKET_LINES;
  i64 number = 0;
  each_line(to.base, to.rows, to.row_bytes, to.stride, [&](u64 line, i64 commands) {
    if (number >= first && number < first + PACKET_LINES)
      memory(COMMUNICATION, line, commands, packet % 2 ? MemoryAccess::UPDATE : MemoryAccess::WRITE, to.write_source, to.updates ? Tag::TRACK : Tag::PLAIN,
             static_cast<u64>(region), now + spec_.to_memory_ps);
    ++number;
  });
}

// Counts a line of a region that has entered a queue; the last one triggers (T3, section 4.2).
void Device::track(i64 number, i64 now) {
  Tracked& tracked = tracked_[static_cast<size_t>(number)];
  const Region& region = in_.regions[static_cast<size_t>(number)];
  i64& in_set = live_by_set_[static_cast<size_t>(region.set)];
  if (!tracked.is_live) {
    tracked.is_live = true;
    most_tracked = std::max(most_tracked, ++live_);
    if (++in_set > spec_.tracker_ways) ++overflows;
  }
  if (--tracked.left > 0) return;
  if (tracked.left < 0) throw ProgramFault("a region gets more stores than it expects");
  tracked.is_complete = true;
  --live_;
  --in_set;
  if (region.dma_to >= 0) push(now + spec_.dma_ps, What::DMA, number);
  for (const i64 slot : tracked.slots)
    if (--slots_[static_cast<size_t>(slot)].waits == 0) push(now + spec_.dma_ps, What::BEGIN, slot);
  tracked.slots.clear();
  if (region.kernel >= 0) {
    --regions_left_[static_cast<size_t>(region.kernel)];
    end_kernel_if_done(now);
  }
}

void Device::pump_dma(i64 now) {
  while (!dma_queue_.empty()) {
    const i64 number = dma_queue_.front(), lines = tracked_[static_cast<size_t>(number)].lines;
    if (dma_lines_ > 0 && dma_lines_ + lines > spec_.dma_lines) return;
    dma_queue_.pop_front();
    dma_lines_ += lines;
    dma_left_[static_cast<size_t>(number)] = lines;
    const Region& region = in_.regions[static_cast<size_t>(number)];
    each_line(region.base, region.rows, region.row_bytes, region.stride, [&](u64 line, i64 commands) {
      memory(COMMUNICATION, line, commands, MemoryAccess::READ, region.read_source, Tag::DMA, static_cast<u64>(number), now + spec_.to_memory_ps);
    });
  }
}

}  // namespace meshweave
