// Races of one-sided accesses (`ir.analysis.races`): two that overlap, at least one of them a write, and nothing orders them.
#pragma once

#include "expand.hpp"

namespace meshweave {

// Raises a Doubt where there is a race, or more to compare than is worth it. `order` lists ops by number, event after
// event, the members of a collective in the order of their group; `rank_of` is by op. The program keeps its accesses.
void check_races(const Expanded& program, const std::vector<std::vector<i64>>& order, const std::vector<i64>& rank_of,
                 i64& blocks_left);

}  // namespace meshweave
