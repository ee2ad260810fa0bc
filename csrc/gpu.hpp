// GPUs whose kernels go through caches and memory controllers, and the track and trigger of T3 (Pati et al., ASPLOS '24).
//
// A device runs kernels one after the other. A kernel is a list of units (work groups) that compute units take in order:
//
//   product  a tile of a matrix product: it loads slices of A and B along k into two buffers, through the cache, and
//            multiplies what has come while it loads the next; then it stores its tile.
//   move     a block of a collective as kernels run it: it loads one or two blocks, through the cache, and sends or
//            stores the result.
//
// A compute unit waits for so many bytes at most, and asks for more as they come. Loads and stores go through slices of
// the cache, each of which serves one after the other; a slice whose channel has a full queue serves none, so that hits
// wait behind misses and stores.
//
// What a unit stores goes to a region: a rectangle of memory. A store is cached (written to the cache), local (past the
// cache, as a write or as an update by near-memory compute), or remote (over the link, into a region of the next
// device). A region may expect a number of lines, of local and remote stores together. The tracker counts them as they
// enter the queues of memory; the last one triggers what the region says: nothing, or a DMA of it to the next device.
// A unit may wait until regions are complete. A region with a DMA that expects no stores is sent when its kernel starts.
//
// A device has a link to each device that it sends to, named by how many places on that is; in a ring there is one. With
// one device what it sends comes back to itself, as what others would have sent at the same time (T3, section 5.1.1).
// Regions are numbered alike on all devices.
//
// All times are integers in picoseconds. Cores and channels act in turns of `turn_ps`, the least time that anything
// takes between them, so that neither can be late for the other.
#pragma once

#include <vector>

#include "channel.hpp"
#include "columns.hpp"

namespace meshweave {

struct GpuResult {
  std::vector<i64> kernel_starts, kernel_ends;  // by device and kernel
  std::vector<i64> traffic;                     // column commands by source
  std::vector<i64> bins;                        // column commands by bin of time and source, of the first device
  std::vector<i64> occupancy;                   // entries in the queues by bin of time, summed over channels and turns
  std::vector<i64> waits;                       // by bin of time, cycles summed over channels: the policy held communication
                                                // back; computing waited behind communication; communication behind computing
  std::vector<i64> counters;                    // see gpu.cpp
};

// Columns: "spec", "timing", "controller", "kernels", "units", "regions", "operands". A run of more than `max_steps`
// accesses, events, and channels in turns is a ProgramFault. `check_signals` is called now and then; it may throw.
GpuResult run_gpus(const Columns& columns, i64 num_devices, i64 max_steps, void (*check_signals)(i64));

// Columns: "timing", "controller", "requests": stream, arrival, bank, row, column commands, access and tag of each.
// Returns what happens to them: cycle, whether it is done (else it enters the queue), tag.
Column run_channel(const Columns& columns);

}  // namespace meshweave
