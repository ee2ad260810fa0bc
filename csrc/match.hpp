// The matching of collectives and messages between ranks (`ir.analysis.matching`).
#pragma once

#include "expand.hpp"

namespace meshweave {

constexpr i64 NONE = -1;

// All members of a collective, or a send with its recv. Ops are numbered over all ranks, by a Numbering.
struct Joint {
  i64 group = NONE;  // of a collective, whose ops are listed from `first` on in Matched::members
  i64 first = NONE;
  i64 sender = NONE, receiver = NONE;  // of a message
};

struct Matched {
  Matched(const Expanded& program, const Numbering& numbering);

  // The op of the member at a place of the group.
  u32 member_op(size_t joint, i64 place) const { return members[static_cast<size_t>(joints[joint].first + place)]; }

  std::vector<Joint> joints;
  std::vector<u32> members;
  std::vector<i32> joint_of;  // by op; -1 for an op without partners
};

}  // namespace meshweave
