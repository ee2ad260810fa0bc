// What `run_gpus` is given: columns, checked once.
#pragma once

#include <vector>

#include "channel.hpp"
#include "columns.hpp"

namespace meshweave {

constexpr i64 NUM_SOURCES = 16;
// What bounds memory, and keeps all sums of times and addresses within 64 bits.
constexpr i64 MOST_UNITS = 4096, MOST_SIDE = 4096, MOST_LINES = i64{1} << 20, MOST_BINS = i64{1} << 20;
constexpr i64 MOST_PS = i64{1} << 50, MOST_TRANSFER_PS = i64{1} << 42;
constexpr i64 MOST_PEERS = 1024;
constexpr i64 COLUMN_BYTES = 32;  // of a column command

struct GpuSpec {
  i64 units, flops_per_s;  // compute units, and what each multiplies and adds in a second
  i64 in_flight_lines;     // that a compute unit may have asked for and not yet have
  i64 line_bytes, cache_lines, cache_ways, cache_banks, bank_ps;  // bank_ps: of a line
  i64 hit_ps, to_memory_ps, from_memory_ps, store_ps;             // store_ps: a unit stores a line
  i64 channels, memory_ps;                                        // memory_ps: of a cycle of the memory
  i64 link_bytes_per_s, link_ps;
  i64 dma_lines, dma_ps;  // lines that DMA may have read and not yet sent; from trigger to first read
  i64 tracker_sets, tracker_ways;
  i64 bin_ps;
  i64 turn_ps;  // the least of to_memory_ps, from_memory_ps and dma_ps
};

enum class Store : i64 { CACHED, LOCAL, LOCAL_UPDATE, REMOTE, REMOTE_UPDATE };

struct Region {
  i64 base, rows, row_bytes, stride;
  i64 updates;  // stores of the whole region that complete it; 0: it is not tracked
  i64 kernel;   // that ends only after it is complete; -1: none
  i64 dma_to, dma_updates;  // region of the next device, -1: none; whether it is updated
  i64 read_source, write_source, set;  // sources of its DMA reads, and of what arrives; set of the tracker
  i64 dma_peer;                        // of its DMA: the device so many places on
};

struct Operands {
  i64 a_base, a_stride, a_by_k, b_base, b_stride, b_by_k;  // by_k: elements along k lie side by side
  i64 item_bytes, slice;                                   // slice: elements along k that a unit loads at once
};

struct Unit {
  i64 kernel, region, wait;  // region that it stores to; first region that it waits for, -1: none
  Store store;
  i64 operands;                      // -1: a move
  i64 i0, i1, j0, j1, k0, k1;        // of a product
  i64 read, other;                   // regions that a move reads, -1: none
  i64 peer, waits;                   // a remote store goes to the device so many places on; regions that it waits for
};

struct Kernel {
  i64 first, last;  // units
  i64 compute_units, slots, launch_ps, read_source, write_source;
  i64 observed;  // units after which the intensity of memory accesses is known and decides MCA's threshold; 0: never
};

// A channel's memory and controller, from the columns "timing" and "controller".
struct MemoryInput {
  DramTiming timing;
  Controller controller;

  explicit MemoryInput(const Columns& columns);
};

// What two readings of one text differ in, from the column "options".
struct GpuOptions {
  i64 drains;      // whether MCA's threshold is lifted from the end of a kernel's last work group to the next kernel
  i64 plain_sets;  // whether the set of a line is its number modulo the sets, and not a hash of it
};

struct GpuInput : MemoryInput {
  GpuSpec spec;
  GpuOptions options;
  std::vector<Kernel> kernels;
  std::vector<Unit> units;
  std::vector<Region> regions;
  std::vector<Operands> operands;

  explicit GpuInput(const Columns& columns);
};

}  // namespace meshweave
