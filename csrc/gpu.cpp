#include "gpu.hpp"

#include <algorithm>

#include "gpu_device.hpp"

namespace meshweave {
namespace {

constexpr i64 MOST_CACHE_LINES = i64{1} << 24;
constexpr i64 SIGNAL_TURNS = 1024;  // from one look at signals to the next

}  // namespace

GpuResult run_gpus(const Columns& columns, i64 num_devices, i64 max_steps, void (*check_signals)(i64)) {
  const GpuInput input(columns);
  require(num_devices >= 1 && num_devices <= 1024, "gpu: from 1 to 1024 devices");
  require(num_devices * input.spec.cache_lines <= MOST_CACHE_LINES, "gpu: the caches of so many devices are too large");
  require(num_devices * input.spec.channels * input.controller.queue <= MOST_CACHE_LINES, "gpu: too many channels");
  Budget budget{max_steps};
  std::vector<Device> devices;
  devices.reserve(static_cast<size_t>(num_devices));
  for (i64 at = 0; at < num_devices; ++at) devices.emplace_back(input, budget);
  for (size_t at = 0; at < devices.size(); ++at) {
    std::vector<Device*> peers;
    for (size_t shift = 0; shift < devices.size(); ++shift) peers.push_back(&devices[(at + shift) % devices.size()]);
    devices[at].connect(std::move(peers));
  }

  const i64 turn = input.spec.turn_ps;
  i64 turns = 0;
  for (i64 end = turn;;) {
    if (++turns % SIGNAL_TURNS == 0) check_signals(end);
    for (Device& device : devices) device.run(end);
    const auto finished = [](const Device& device) { return device.is_finished(); };
    if (std::all_of(devices.begin(), devices.end(), finished)) break;
    i64 next = end + turn;
    const auto empty = [](const Device& device) { return device.is_memory_empty(); };
    if (std::all_of(devices.begin(), devices.end(), empty)) {
      i64 first = INT64_MAX;
      for (const Device& device : devices)
        if (device.has_events()) first = std::min(first, device.next_event_ps());
      if (first == INT64_MAX) throw ProgramFault("units wait for regions that are never completed");
      next = std::max(next, first / turn * turn + turn);
    }
    end = next;
  }

  GpuResult out;
  for (const Device& device : devices) {
    out.kernel_starts.insert(out.kernel_starts.end(), device.kernel_starts.begin(), device.kernel_starts.begin() + static_cast<std::ptrdiff_t>(input.kernels.size()));
    out.kernel_ends.insert(out.kernel_ends.end(), device.kernel_ends.begin(), device.kernel_ends.end());
  }
  const Device& first = devices.front();
  out.traffic = first.traffic;
  out.bins = first.bins;
  out.occupancy = first.occupancy;
  out.waits = first.waits;
  const Device::Totals totals = first.totals();
  out.counters = {first.threshold, first.most_tracked, first.overflows, first.hits, first.misses, first.sent_bytes,
                  totals.activates, totals.turns, totals.commands, totals.held_cycles, totals.busy_cycles, totals.occupancy,
                  totals.compute_behind, totals.communication_behind};
  return out;
}

}  // namespace meshweave
