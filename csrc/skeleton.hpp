// The time of a skeleton with chains, followed on every rank of a grid (`estimate.chains`).
#pragma once

#include <vector>

#include "error.hpp"

namespace meshweave {

// Returns the picoseconds until all ranks have ended. `code` is what `estimate.chains` writes.
i64 skeleton_ps(const std::vector<i64>& code);

}  // namespace meshweave
