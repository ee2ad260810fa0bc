// One GPU of `gpu.hpp`: compute units, cache, channels, link, DMA engine and tracker.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <deque>
#include <queue>
#include <vector>

#include "cache.hpp"
#include "gpu_spec.hpp"
#include "ring_buffer.hpp"

namespace meshweave {

inline i64 blocks_of(i64 a, i64 b) { return (a + b - 1) / b; }

// Picoseconds of an amount at a rate.
inline i64 time_ps(i64 amount, i64 per_s) {
  constexpr i64 PS = 1'000'000'000'000;
  const u128 out = (static_cast<u128>(amount) * PS + static_cast<u128>(per_s) - 1) / static_cast<u128>(per_s);
  if (out > static_cast<u128>(MOST_TRANSFER_PS)) throw ProgramFault("a tile takes more than 4 seconds");
  return static_cast<i64>(out);
}

// Divides by a number that stays, mostly a power of two.
class Divisor {
 public:
  explicit Divisor(u64 divisor) : divisor_(divisor), shift_(std::has_single_bit(divisor) ? std::countr_zero(divisor) : -1) {}
  u64 divisor() const { return divisor_; }
  u64 quotient(u64 number) const { return shift_ >= 0 ? number >> shift_ : number / divisor_; }
  u64 rest(u64 number) const { return shift_ >= 0 ? number & (divisor_ - 1) : number % divisor_; }

 private:
  u64 divisor_;
  int shift_;
};

// What a run may still do: accesses, events, and channels in turns.
struct Budget {
  i64 left;
  void spend(i64 steps) {
    if ((left -= steps) < 0) throw ProgramFault("the run takes more steps than it may");
  }
};

class Device {
 public:
  Device(const GpuInput& input, Budget& budget);

  // Whom it sends to, by the number of places on: itself where one device stands for all. Each has a link of its own.
  void connect(std::vector<Device*> peers) { peers_ = std::move(peers); }
  // Runs what happens before `end_ps`: first the channels, then the rest. Neither is late for the other within a turn.
  void run(i64 end_ps);
  bool is_finished() const { return kernel_ >= static_cast<i64>(in_.kernels.size()) && is_idle(); }
  bool has_events() const { return !events_.empty(); }
  bool is_memory_empty() const;
  i64 next_event_ps() const { return events_.top().at_ps; }

  struct Totals {
    i64 activates = 0, turns = 0, commands = 0, held_cycles = 0, busy_cycles = 0, occupancy = 0;
    i64 compute_behind = 0, communication_behind = 0;  // cycles in which one waits while the other goes into a queue
  };
  Totals totals() const;
  std::vector<i64> kernel_starts, kernel_ends;
  std::vector<i64> traffic;    // column commands by source, reads of memory and writes to it
  std::vector<i64> bins;       // the same, by bin of time
  std::vector<i64> occupancy;  // entries of the queues summed over the cycles of each bin
  std::vector<i64> waits;      // by bin: cycles of held_cycles, compute_behind and communication_behind of Totals
  i64 threshold = 0, most_tracked = 0, overflows = 0, hits = 0, misses = 0, sent_bytes = 0;

 private:
  enum class What : u32 { KERNEL, PART, MULTIPLIED, TAKE, BEGIN, ARRIVE, DMA, DMA_READ, DMA_SENT };
  struct Event {
    i64 at_ps;
    u64 number;
    What what;
    i64 a, b;
    bool operator>(const Event& other) const {
      return at_ps != other.at_ps ? at_ps > other.at_ps : number > other.number;
    }
  };
  // Lines that are asked for together, as the loads of a wavefront are.
  struct Part {
    static constexpr size_t LINES = 32;
    i64 group, latest_ps = 0;  // a group is twice its slot plus its number
    u32 count = 0, outstanding = 0;
    std::array<u64, LINES> lines;
  };
  // What a compute unit has yet to ask for, in turn, and how many lines it waits for.
  struct Loader {
    RingBuffer<u32> parts;
    i64 in_flight = 0;
  };
  // Parts that a unit waits for together.
  struct Group {
    i64 left = 0;
    bool is_ready = false;
  };
  struct Slot {
    i64 unit = -1, slices = 0, loaded = 0, started = 0, multiplied = 0, waits = 0;  // waits: regions to come
    Group groups[2];
  };
  struct Waiter {
    u32 part, next;
  };
  struct Tracked {
    i64 lines = 0, left = 0;  // lines of the region; stores of lines that are still to come
    bool is_complete = false, is_live = false;
    std::vector<i64> slots;  // that wait for it
  };
  enum class Tag : u64 { PLAIN, TRACK, FILL, LOAD, DMA };
  // What a slice of the cache is to do, in turn: load a line for a group, write one, or pass on a store past it.
  struct Access {
    enum { LOAD, WRITE, PAST, UPDATE } kind;
    u64 line;
    u32 source, commands;
    i64 of;  // part, or region
  };
  struct Slice {
    i64 free_ps = 0;
    RingBuffer<Access> waiting;
  };

  void push(i64 at_ps, What what, i64 a = 0, i64 b = 0) {
    if (at_ps > MOST_PS) throw ProgramFault("the run lasts more than 18 minutes");
    budget_.spend(1);
    events_.push({at_ps, events_pushed_++, what, a, b});
  }
  void handle(const Event& event);
  void run_channels(i64 end_ps);
  bool is_idle() const { return events_.empty() && dma_queue_.empty() && is_memory_empty(); }

  void start_kernel(i64 now);
  void end_kernel_if_done(i64 now);
  void observe(i64 now);
  void set_threshold(i64 entries);
  void take(i64 slot, i64 now);
  void begin(i64 slot, i64 now);
  void load_slice(i64 slot, i64 now);
  // Has a group wait for the lines of `wanted_`.
  void ask(i64 group, i64 now);
  // Has a compute unit ask for parts while it may wait for more lines.
  void issue(size_t unit, i64 now);
  void end_part_if_loaded(i64 part);
  void end_part(i64 part, i64 now);
  size_t compute_unit(i64 slot) const { return static_cast<size_t>(slot % in_.kernels[static_cast<size_t>(kernel_)].compute_units); }
  void multiply(i64 slot, i64 now);
  void store(i64 slot, i64 now);

  // Visits the lines that rows of bytes touch, each with how many of its column commands they touch.
  template <class Visit>
  void each_line(i64 base, i64 rows, i64 bytes, i64 stride, Visit visit) const {
    for (i64 row = 0; row < rows; ++row) {
      const i64 first = base + row * stride, end = first + bytes;
      for (i64 at = first; at < end;) {
        const i64 line = at >> line_shift_, stop = std::min(end, (line + 1) << line_shift_);
        visit(static_cast<u64>(line), (stop - 1) / COLUMN_BYTES - at / COLUMN_BYTES + 1);
        at = stop;
      }
    }
  }
  // Gives a slice an access; it waits while the slice's first one does.
  void access(const Access& access, i64 now);
  // Has slices go on whose channels have room.
  void advance_slices(i64 now);
  void serve(Slice& slice, const Access& access, i64 now);
  void load(const Access& access, i64 at_ps);
  void write_cached(const Access& access, i64 at_ps);
  void evict(u32 place, i64 now);
  size_t channel_of(u64 line) const;
  bool has_room(size_t channel) const { return channels_[channel].waiting(COMPUTE) < room_; }
  u32 reader() const { return static_cast<u32>(in_.kernels[static_cast<size_t>(kernel_)].read_source); }
  i64 whole_line() const { return spec_.line_bytes / COLUMN_BYTES; }  // column commands
  void memory(i64 stream, u64 line, i64 commands, MemoryAccess access, i64 source, Tag tag, u64 payload, i64 at_ps);

  void send(const Region& from, i64 to, i64 peer, bool updates, i64 now, i64& sent_ps);
  void arrive(i64 region, i64 packet, i64 now);
  void track(i64 region, i64 now);
  void pump_dma(i64 now);

  const GpuInput& in_;
  Budget& budget_;
  const GpuSpec& spec_;
  int line_shift_;
  Divisor by_channels_, by_slices_;  // by_slices_: of a channel
  Divisor by_row_, by_bank_pairs_;   // by_row_: pairs of lines of a row
  std::vector<Device*> peers_;
  Cache cache_;
  std::vector<Channel> channels_;
  std::vector<i64> last_arrival_;  // by channel and stream
  std::vector<MemoryEvent> memory_events_;
  std::vector<Slice> slices_;
  std::vector<size_t> blocked_;  // slices whose accesses wait
  i64 room_;                     // requests of slices that may wait for a controller
  std::vector<i64> unit_free_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  u64 events_pushed_ = 0;
  std::vector<Slot> slots_;
  std::vector<u64> wanted_;  // lines that a unit is about to load
  std::vector<Part> parts_;
  std::vector<u32> free_parts_;
  std::vector<Loader> loaders_;  // by compute unit
  std::vector<Waiter> waiters_;
  u32 free_waiter_ = Cache::NONE;
  std::vector<Tracked> tracked_;
  std::vector<i64> live_by_set_;
  i64 live_ = 0;
  std::vector<i64> link_free_;  // by peer
  std::deque<i64> dma_queue_;  // regions
  std::vector<i64> dma_left_;  // lines still to be read, by region
  i64 dma_lines_ = 0;
  i64 kernel_ = -1, next_unit_ = 0, units_left_ = 0, units_done_ = 0;
  std::vector<i64> regions_left_;  // by kernel
  i64 begin_occupancy_ = 0;
};

}  // namespace meshweave
