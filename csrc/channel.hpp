// A memory channel: a controller that arbitrates two streams of requests into one queue, and its DRAM banks.
//
// Time is counted in cycles of the memory clock. In a cycle the channel does three things, in this order:
//
//   1. Column: it issues the next column command of one request whose row is open. It stays in the direction of the
//      data bus (reads, or writes and updates) while the queue has such a request of that direction, for at most
//      `turn_limit` commands once one of the other direction waits; among those it takes the oldest whose timing
//      allows one now.
//   2. Row: for the oldest request whose row is not open and whose timing allows it, it closes the bank's row or opens
//      the wanted one. A row that other requests of the queue want stays open, but for the queue's oldest request
//      once that is older than `age_limit`.
//   3. Arbitration: one request that has arrived moves from a stream to the end of the queue, if there is room for its
//      column commands.
//
// (FR-FCFS with batches of a direction.) A request is a run of column commands in one row. Refresh is left out. An
// update (near-memory op and store) delays the next column command of its bank group by `ccdwl` instead of `ccdl`.
#pragma once

#include <vector>

#include "error.hpp"
#include "ring_buffer.hpp"

namespace meshweave {

struct DramTiming {
  i64 groups, banks, columns;  // bank groups, banks in all, column commands of a row
  i64 ccd, ccdl, ccdwl;        // column to column: any bank, same group, same group after an update
  i64 rcd, rp, ras, rc, rrd;   // row commands
  i64 cl, wl, wtr, wr, rtp;    // latencies of reads and writes, write to read, write recovery, read to precharge
};

enum class Policy : i64 { ROUND_ROBIN, COMPUTE_FIRST, COMMUNICATION_AWARE };
enum class MemoryAccess : u32 { READ, WRITE, UPDATE };
constexpr i64 COMPUTE = 0, COMMUNICATION = 1;  // the streams

struct Controller {
  Policy policy;
  i64 queue, turn_limit, age_limit;  // column commands of its entries; column commands; cycles
  i64 threshold, starvation;         // COMMUNICATION_AWARE: commands in the queue below which, and cycles after which, it issues
};

struct Request {
  i64 arrival;    // cycle from which it may be issued
  u32 bank, row;  // bank group = bank % groups
  u32 commands;   // column commands
  MemoryAccess access;
  u32 source;  // what it is counted for
  u64 tag;     // given back with its events
};

// What happened to a request: it entered the queue, or its data are read or written.
struct MemoryEvent {
  i64 cycle;
  bool is_done;
  MemoryAccess access;
  u64 tag;
};

class Channel {
 public:
  Channel(const DramTiming& timing, const Controller& controller);

  // Appends a request to a stream, whose arrivals do not decrease.
  void push(i64 stream, const Request& request);
  // Runs all cycles before `end`, and appends what happens to `out` in the order of cycles.
  void run(i64 end, std::vector<MemoryEvent>& out);

  bool empty() const { return queued_ == 0 && streams_[0].empty() && streams_[1].empty(); }
  // Requests of a stream that are not in the queue yet.
  i64 waiting(i64 stream) const { return static_cast<i64>(streams_[stream].size()); }
  void set_threshold(i64 threshold) { controller_.threshold = threshold; }
  // The sum over all cycles of the column commands in the queue, and of those cycles in which there was one.
  i64 occupancy() const { return occupancy_; }
  i64 busy_cycles() const { return busy_; }

  // Counters over the whole run.
  struct Counters {
    i64 column_commands = 0, activates = 0, turns = 0;
    i64 held_cycles = 0;  // in which the policy held communication back although there was room
    i64 behind_other[2] = {0, 0};  // by stream: cycles in which it had a request and one of the other went into the queue
  };
  const Counters& counters() const { return counters_; }

 private:
  struct Bank {
    i64 row = -1;
    i64 column = 0, close = 0, open = 0;  // the first cycle of such a command
    i64 hits = 0;                         // requests of the queue that want its open row
  };
  struct Entry {
    Request request;
    i64 entered;
    u64 age;
  };
  using Slots = std::vector<u8>;  // of the queue, by age

  bool column(i64 now, std::vector<MemoryEvent>& out);
  bool row(i64 now);
  bool arbitrate(i64 now, std::vector<MemoryEvent>& out);
  i64 choose_stream(i64 now);
  i64 wake(i64 now) const;
  void open(u32 bank, u32 row, i64 now);
  void close(u32 bank, i64 now);
  void insert(Slots& slots, u8 slot);
  bool is_ready(i64 stream, i64 now) const { return !streams_[stream].empty() && streams_[stream].front().arrival <= now; }
  static bool writes_of(const Entry& entry) { return entry.request.access != MemoryAccess::READ; }

  DramTiming timing_;
  Controller controller_;
  RingBuffer<Request> streams_[2];
  std::vector<Entry> entries_;  // of the queue, by slot
  Slots free_;
  Slots hits_[2];  // those whose row is open, by direction
  Slots misses_;   // the others
  i64 column_retry_ = 0;  // no column command is possible before, unless a row or the queue changes
  i64 row_retry_ = 0;  // no row command is possible before, unless the queue changes
  u64 ages_ = 0;
  std::vector<Bank> banks_;
  std::vector<i64> group_ready_;
  i64 any_ready_ = 0, direction_ready_[2] = {0, 0}, open_ready_ = 0;
  bool writes_ = false;
  i64 run_ = 0;             // column commands since the direction changed
  i64 last_stream_ = COMMUNICATION, last_communication_ = 0;
  bool held_ = false;  // communication, in this cycle
  i64 now_ = 0, queued_ = 0, occupancy_ = 0, busy_ = 0;  // queued_: column commands
  Counters counters_;
};

}  // namespace meshweave
