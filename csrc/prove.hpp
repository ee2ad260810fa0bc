// The proof that a program is sound (`ir.analysis.validate`), from the columns of its template: ranks are expanded, ops and
// their partners fit, an order exists, no one-sided accesses race, and each output is what the program declares.
#pragma once

#include "columns.hpp"

namespace meshweave {

enum class Verdict : i64 {
  UNKNOWN,    // it does not hold, or only the reference can say
  HOLDS,
  UNLABELLED  // it holds but for what is computed, which would take too much work to prove
};

// Takes the columns that `ir/columns/proof.py` writes. Raises BadInput where these describe no program.
Verdict prove(const Columns& columns);

}  // namespace meshweave
