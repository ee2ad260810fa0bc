#include "gpu_device.hpp"

#include <algorithm>
#include <bit>

namespace meshweave {
namespace {

// MCA's thresholds by the mean entries in the queues while the kernel ran alone.
struct Intensity {
  i64 entries, threshold;
};
constexpr Intensity INTENSITIES[] = {{32, 5}, {16, 10}, {8, 30}};

}  // namespace

Device::Device(const GpuInput& input, Budget& budget)
    : traffic(NUM_SOURCES, 0),
      in_(input),
      budget_(budget),
      spec_(input.spec),
      line_shift_(std::countr_zero(static_cast<u64>(input.spec.line_bytes))),
      by_channels_(static_cast<u64>(input.spec.channels)),
      by_slices_(static_cast<u64>(std::max<i64>(input.spec.cache_banks / input.spec.channels, 1))),
      by_row_(static_cast<u64>(std::max<i64>(input.timing.columns / whole_line() / 2, 1))),
      by_bank_pairs_(static_cast<u64>(std::max<i64>(input.timing.banks / 2, 1))),
      cache_(input.spec.cache_lines, input.spec.cache_ways, input.options.plain_sets != 0),
      channels_(static_cast<size_t>(input.spec.channels), Channel(input.timing, input.controller)),
      last_arrival_(static_cast<size_t>(2 * input.spec.channels), 0),
      slices_(static_cast<size_t>(input.spec.cache_banks)),
      room_(std::max<i64>(std::max<i64>(input.spec.cache_banks / input.spec.channels, 1) * input.controller.queue / whole_line(), 1)),
      unit_free_(static_cast<size_t>(input.spec.units), 0),
      loaders_(static_cast<size_t>(input.spec.units)),
      tracked_(input.regions.size()),
      live_by_set_(static_cast<size_t>(input.spec.tracker_sets), 0),
      dma_left_(input.regions.size(), 0),
      regions_left_(input.kernels.size(), 0) {
  for (size_t at = 0; at < in_.regions.size(); ++at) {
    const Region& region = in_.regions[at];
    budget.spend(region.rows);
    for (i64 row = 0; row < region.rows; ++row) {
      const i64 first = region.base + row * region.stride, last = first + region.row_bytes - 1;
      tracked_[at].lines += (last >> line_shift_) - (first >> line_shift_) + 1;
    }
    tracked_[at].left = tracked_[at].lines * region.updates;
    if (region.kernel >= 0 && region.updates > 0) ++regions_left_[static_cast<size_t>(region.kernel)];
  }
  threshold = in_.controller.threshold;
  if (!in_.kernels.empty()) push(in_.kernels[0].launch_ps, What::KERNEL);
}

bool Device::is_memory_empty() const {
  return std::all_of(channels_.begin(), channels_.end(), [](const Channel& channel) { return channel.empty(); });
}

Device::Totals Device::totals() const {
  Totals out;
  for (const Channel& channel : channels_) {
    out.activates += channel.counters().activates;
    out.turns += channel.counters().turns;
    out.commands += channel.counters().column_commands;
    out.held_cycles += channel.counters().held_cycles;
    out.compute_behind += channel.counters().behind_other[COMPUTE];
    out.communication_behind += channel.counters().behind_other[COMMUNICATION];
    out.busy_cycles += channel.busy_cycles();
    out.occupancy += channel.occupancy();
  }
  return out;
}

void Device::run(i64 end_ps) {
  run_channels(end_ps);
  advance_slices(end_ps - spec_.turn_ps);
  while (!events_.empty() && events_.top().at_ps < end_ps) {
    const Event event = events_.top();
    events_.pop();
    handle(event);
  }
}

void Device::handle(const Event& event) {
  const i64 now = event.at_ps;
  switch (event.what) {
    case What::KERNEL: return start_kernel(now);
    case What::PART: return end_part(event.a, now);
    case What::MULTIPLIED: {
      Slot& slot = slots_[static_cast<size_t>(event.a)];
      ++slot.multiplied;
      if (slot.loaded < slot.slices) load_slice(event.a, now);
      return slot.multiplied == slot.slices ? store(event.a, now) : multiply(event.a, now);
    }
    case What::TAKE:
      --units_left_;
      if (++units_done_ == in_.kernels[static_cast<size_t>(kernel_)].observed) observe(now);
      if (units_left_ == 0 && in_.options.drains) set_threshold(in_.controller.queue + 1);  // until the next kernel (T3, section 4.5)
      take(event.a, now);
      return end_kernel_if_done(now);
    case What::BEGIN: return begin(event.a, now);
    case What::ARRIVE: return arrive(event.a, event.b, now);
    case What::DMA:
      dma_queue_.push_back(event.a);
      return pump_dma(now);
    case What::DMA_READ: {
      const Region& region = in_.regions[static_cast<size_t>(event.a)];
      i64 sent_ps = 0;
      send(region, region.dma_to, region.dma_peer, region.dma_updates != 0, now, sent_ps);
      return push(sent_ps, What::DMA_SENT, event.a);
    }
    case What::DMA_SENT:
      dma_lines_ -= tracked_[static_cast<size_t>(event.a)].lines;
      return pump_dma(now);
  }
}

// --- kernels and units -----------------------------------------------------------------------------------------------

void Device::start_kernel(i64 now) {
  ++kernel_;
  kernel_starts.push_back(now);
  if (kernel_ >= static_cast<i64>(in_.kernels.size())) return;
  const Kernel& kernel = in_.kernels[static_cast<size_t>(kernel_)];
  next_unit_ = kernel.first;
  units_left_ = kernel.last - kernel.first;
  units_done_ = 0;
  begin_occupancy_ = totals().occupancy;
  if (in_.options.drains) set_threshold(threshold);
  slots_.assign(static_cast<size_t>(kernel.compute_units * kernel.slots), Slot{});
  for (i64 slot = 0; slot < static_cast<i64>(slots_.size()); ++slot) take(slot, now);
  for (size_t at = 0; at < in_.regions.size(); ++at)  // what is there already, and is sent without a trigger
    if (in_.regions[at].kernel == kernel_ && in_.regions[at].updates == 0 && in_.regions[at].dma_to >= 0)
      push(now + spec_.dma_ps, What::DMA, static_cast<i64>(at));
  end_kernel_if_done(now);
}

void Device::end_kernel_if_done(i64 now) {
  if (kernel_ < 0 || kernel_ >= static_cast<i64>(in_.kernels.size())) return;
  if (static_cast<i64>(kernel_ends.size()) > kernel_ || units_left_ > 0 || regions_left_[static_cast<size_t>(kernel_)] > 0) return;
  kernel_ends.push_back(now);
  if (kernel_ + 1 < static_cast<i64>(in_.kernels.size()))
    push(now + std::max(in_.kernels[static_cast<size_t>(kernel_ + 1)].launch_ps, spec_.turn_ps), What::KERNEL);
  else
    ++kernel_;
}

// Decides how many entries the queues may have for communication to be issued (T3, section 4.5).
void Device::observe(i64 now) {
  const i64 cycles = std::max<i64>((now - kernel_starts.back()) / spec_.memory_ps, 1);
  const i64 entries = (totals().occupancy - begin_occupancy_) / (cycles * spec_.channels);
  threshold = in_.controller.queue + 1;
  for (const Intensity& known : INTENSITIES)
    if (entries >= known.entries) {
      threshold = known.threshold;
      break;
    }
  set_threshold(threshold);
}

void Device::set_threshold(i64 entries) {
  for (Channel& channel : channels_) channel.set_threshold(entries);
}

void Device::take(i64 slot, i64 now) {
  Slot& of = slots_[static_cast<size_t>(slot)];
  of = Slot{};
  if (next_unit_ >= in_.kernels[static_cast<size_t>(kernel_)].last) return;
  of.unit = next_unit_++;
  const Unit& unit = in_.units[static_cast<size_t>(of.unit)];
  if (unit.wait >= 0)
    for (i64 at = unit.wait; at < unit.wait + unit.waits; ++at)
      if (Tracked& region = tracked_[static_cast<size_t>(at)]; !region.is_complete) {
        region.slots.push_back(slot);
        ++of.waits;
      }
  if (of.waits == 0) begin(slot, now);
}

void Device::begin(i64 slot, i64 now) {
  Slot& of = slots_[static_cast<size_t>(slot)];
  const Unit& unit = in_.units[static_cast<size_t>(of.unit)];
  if (unit.operands >= 0) {
    of.slices = blocks_of(unit.k1 - unit.k0, in_.operands[static_cast<size_t>(unit.operands)].slice);
    load_slice(slot, now);
    if (of.loaded < of.slices) load_slice(slot, now);
    return;
  }
  for (const i64 read : {unit.read, unit.other})
    if (read >= 0) {
      const Region& region = in_.regions[static_cast<size_t>(read)];
      each_line(region.base, region.rows, region.row_bytes, region.stride, [&](u64 line, i64) { wanted_.push_back(line); });
    }
  ask(2 * slot, now);
}

void Device::load_slice(i64 slot, i64 now) {
  Slot& of = slots_[static_cast<size_t>(slot)];
  const Unit& unit = in_.units[static_cast<size_t>(of.unit)];
  const Operands& x = in_.operands[static_cast<size_t>(unit.operands)];
  const i64 group = 2 * slot + of.loaded % 2, k = unit.k0 + of.loaded * x.slice, depth = std::min(x.slice, unit.k1 - k);
  of.groups[of.loaded % 2] = {};
  ++of.loaded;
  const auto block = [&](i64 base, i64 stride, bool by_k, i64 first, i64 last) {
    const auto visit = [&](u64 line, i64) { wanted_.push_back(line); };
    if (by_k)
      each_line(base + first * stride + k * x.item_bytes, last - first, depth * x.item_bytes, stride, visit);
    else
      each_line(base + k * stride + first * x.item_bytes, depth, (last - first) * x.item_bytes, stride, visit);
  };
  block(x.a_base, x.a_stride, x.a_by_k != 0, unit.i0, unit.i1);
  block(x.b_base, x.b_stride, x.b_by_k != 0, unit.j0, unit.j1);
  ask(group, now);
}

void Device::ask(i64 group, i64 now) {
  const size_t unit = compute_unit(group / 2), most = std::min(Part::LINES, static_cast<size_t>(spec_.in_flight_lines));
  for (size_t at = 0; at < wanted_.size(); at += most) {
    if (free_parts_.empty()) {
      free_parts_.push_back(static_cast<u32>(parts_.size()));
      parts_.emplace_back();
    }
    const u32 number = free_parts_.back();
    free_parts_.pop_back();
    Part& part = parts_[number];
    part.group = group;
    part.count = static_cast<u32>(std::min(most, wanted_.size() - at));
    std::copy_n(wanted_.begin() + static_cast<std::ptrdiff_t>(at), part.count, part.lines.begin());
    loaders_[unit].parts.push_back(number);
    ++slots_[static_cast<size_t>(group / 2)].groups[group % 2].left;
  }
  wanted_.clear();
  issue(unit, now);
}

void Device::issue(size_t unit, i64 now) {
  Loader& loader = loaders_[unit];
  while (!loader.parts.empty()) {
    const u32 number = loader.parts.front();
    Part& part = parts_[number];
    if (loader.in_flight + part.count > spec_.in_flight_lines) return;
    loader.parts.pop_front();
    loader.in_flight += part.count;
    part.outstanding = part.count;
    part.latest_ps = now;
    for (u32 at = 0; at < part.count; ++at) cache_.prefetch(part.lines[at]);
    for (u32 at = 0; at < part.count; ++at) access({Access::LOAD, part.lines[at], reader(), 0, number}, now);
    end_part_if_loaded(number);
  }
}

void Device::end_part_if_loaded(i64 number) {
  const Part& part = parts_[static_cast<size_t>(number)];
  if (part.outstanding == 0) push(part.latest_ps, What::PART, number);
}

void Device::end_part(i64 number, i64 now) {
  const Part& part = parts_[static_cast<size_t>(number)];
  const i64 slot = part.group / 2;
  const size_t unit = compute_unit(slot);
  loaders_[unit].in_flight -= part.count;
  free_parts_.push_back(static_cast<u32>(number));
  Slot& of = slots_[static_cast<size_t>(slot)];
  Group& group = of.groups[part.group % 2];
  if (--group.left == 0) {
    group.is_ready = true;
    in_.units[static_cast<size_t>(of.unit)].operands < 0 ? store(slot, now) : multiply(slot, now);
  }
  issue(unit, now);
}

// Starts the next slices of a unit that are there; slices are multiplied in their order, units of a compute unit in turn.
void Device::multiply(i64 slot, i64 now) {
  Slot& of = slots_[static_cast<size_t>(slot)];
  const Unit& unit = in_.units[static_cast<size_t>(of.unit)];
  const i64 slice = in_.operands[static_cast<size_t>(unit.operands)].slice;
  while (of.started < of.loaded && of.groups[of.started % 2].is_ready) {
    of.groups[of.started % 2].is_ready = false;
    const i64 depth = std::min(slice, unit.k1 - unit.k0 - of.started * slice);
    ++of.started;
    i64& free_ps = unit_free_[compute_unit(slot)];
    free_ps = std::max(free_ps, now) + time_ps(2 * (unit.i1 - unit.i0) * (unit.j1 - unit.j0) * depth, spec_.flops_per_s);
    push(free_ps, What::MULTIPLIED, slot);
  }
}

void Device::store(i64 slot, i64 now) {
  const Slot& of = slots_[static_cast<size_t>(slot)];
  const Unit& unit = in_.units[static_cast<size_t>(of.unit)];
  const Region& region = in_.regions[static_cast<size_t>(unit.region)];
  const u32 source = static_cast<u32>(in_.kernels[static_cast<size_t>(unit.kernel)].write_source);
  const bool updates = unit.store == Store::LOCAL_UPDATE || unit.store == Store::REMOTE_UPDATE;
  i64 end_ps = now;
  if (unit.store == Store::REMOTE || unit.store == Store::REMOTE_UPDATE) {
    send(region, unit.region, unit.peer, updates, now, end_ps);
    if (unit.operands >= 0) end_ps = now;  // a product's stores are posted; a move goes at the pace of the link
  } else {
    each_line(region.base, region.rows, region.row_bytes, region.stride, [&](u64 line, i64 commands) {
      const auto kind = unit.store == Store::CACHED ? Access::WRITE : updates ? Access::UPDATE : Access::PAST;
      access({kind, line, source, static_cast<u32>(commands), unit.region}, now);
    });
  }
  push(std::max(end_ps, now + tracked_[static_cast<size_t>(unit.region)].lines * spec_.store_ps), What::TAKE, slot);
}

}  // namespace meshweave
