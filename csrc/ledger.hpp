// The split of each op's time into launch, synchronisation, transfer, and waiting for late partners.
#pragma once

#include "collective.hpp"
#include "match.hpp"
#include "result.hpp"

namespace meshweave {

// An op on a rank while it is simulated. Ops are named by a Numbering.
struct OpState {
  i64 issued_ps = -1, ended_ps = -1;
  u32 cause = NOBODY;         // whose end let it be issued
  u32 last_partner = NOBODY;  // the last to be issued, where that was after the op itself
  u32 pending = 0;            // what it still waits for; once issued, its parts that are not over
  u32 rank = 0, index = 0;    // of the rank's ops
  u32 lane = 0;               // among the lanes of all ranks
};

class Ledger {
 public:
  Ledger(const Expanded& program, const Machine& machine, const Matched& matched, std::vector<OpState>& ops, std::vector<Parts>& parts)
      : program_(program), machine_(machine), matched_(matched), ops_(ops), parts_(parts) {}

  // Adds an op that has ended. `last` is the member of its joint issued last, NOBODY for an op without partners.
  void close(u32 op, const OpRow& row, const ClassOp& of, u32 last);

 private:
  struct Fixed {
    i64 launch_ps, sync_ps;
  };

  Fixed fixed_of(u32 op, const OpRow& row, const ClassOp& of, i64 rank) const;
  u32 came_last(u32 op, i64 rank, const OpRow& row, const ClassOp& of, u32 last) const;
  i64 num_steps(const OpRow& row, const ClassOp& of, i64 rank) const;

  const Expanded& program_;
  const Machine& machine_;
  const Matched& matched_;
  std::vector<OpState>& ops_;
  std::vector<Parts>& parts_;
};

}  // namespace meshweave
