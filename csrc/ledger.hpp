// The split of each op's time into launch, synchronisation, transfer, and waiting for late partners.
#pragma once

#include "collective.hpp"
#include "match.hpp"
#include "result.hpp"

namespace meshweave {

class Ledger {
 public:
  Ledger(const Expanded& program, const Machine& machine, const Matched& matched, Result& result)
      : program_(program), machine_(machine), matched_(matched), result_(result) {}

  // Adds an op that has ended. `last` is the member of its joint issued last, NONE for an op without partners.
  void close(u32 op, i64 rank, const OpRow& row, const ClassOp& of, i64 last);

 private:
  i64 came_last(u32 op, i64 rank, const OpRow& row, const ClassOp& of, i64 last) const;
  i64 num_steps(const OpRow& row, const ClassOp& of, i64 rank) const;

  const Expanded& program_;
  const Machine& machine_;
  const Matched& matched_;
  Result& result_;
};

}  // namespace meshweave
