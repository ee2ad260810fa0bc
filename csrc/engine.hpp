// The run: ops are issued as lanes and edges allow, messages wait for their partners, amounts flow.
#pragma once

#include "collective.hpp"
#include "match.hpp"
#include "result.hpp"

namespace meshweave {

// Called now and then with the simulated time; an exception ends the run.
using Progress = void (*)(i64 now_ps);

Result simulate(const Expanded& program, const Machine& machine, Progress progress);

}  // namespace meshweave
