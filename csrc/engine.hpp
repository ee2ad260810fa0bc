// The discrete-event simulation: issues ops as lanes and edges allow, matches messages, and runs flows.
#pragma once

#include "collective.hpp"
#include "match.hpp"
#include "result.hpp"

namespace meshweave {

// A callback that gets the simulated time at intervals; an exception in it ends the run.
using Progress = void (*)(i64 now_ps);

Result simulate(const Expanded& program, const Machine& machine, Progress progress);

}  // namespace meshweave
