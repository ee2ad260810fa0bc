// The expansion of a template into the ops of every rank. Ranks whose ops differ only in their partners form a class.
// A class is expanded once, so that thousands of ranks of a regular program cost no more than one.
#pragma once

#include "edges.hpp"

namespace meshweave {

// An op as all ranks of a class run it. Its kind defines the meaning of `a`, `b` and `c`:
//   matmul          m, n, k of each of `num_products` products
//   copy, add, zero bytes read and written
//   call            FLOPs, bytes; `sizes` holds the sizes that it is counted by
//   all_gather, reduce_scatter, all_to_all   bytes per row of a part; `sizes` holds the rows of each part
//   all_reduce      bytes
//   broadcast, reduce                        bytes, root, packets
//   permute         bytes, shift (0: a copy of so many bytes read and written), hops
//   send, recv      bytes; b is 1 where the view is strided in its memory
//   get, put, accumulate                     bytes, position of the other rank
struct ClassOp {
  i64 row = 0;         // in the template's ops
  i64 a = 0, b = 0, c = 0;
  i64 step = -1;       // index of the step of a lowered collective, -1 for none
  i64 sizes = 0, num_sizes = 0;  // in Class::sizes; a single size is that of every member
  i64 num_products = 1;          // in a batch
  i64 shift = 0;                 // of a permute, as written
};

// The route of a permute's messages (`Route`) by a shift of 0 to count - 1: 1, backwards, where that is shorter, or as
// long and the shift is written as negative. So steps of a ring that runs backwards take the links that it takes.
inline i64 route_of(i64 shift, bool is_negative, i64 count) {
  return 2 * shift > count - is_negative ? 1 : 0;
}

struct Class {
  std::vector<ClassOp> ops;
  Column sizes;
  // For op i, the earlier ops of the same rank that it waits for, and the later ones that wait for it.
  std::vector<i64> before_start, before, after_start, after;
  std::vector<std::vector<i64>> lanes;  // ops by lane, in program order
  Accesses accesses;                    // of its ops, where they are kept
};

struct Rank {
  i64 of_class = 0;
  i64 base = 0;  // number of its first op among the ops of all ranks
};

struct Tracked {
  i64 from, to;  // ops by number over all ranks: `to` waits for the released write of `from`
};

struct Expanded {
  // With `keeps_accesses` each class keeps those of its ops; ProgramFault is raised where they are too many.
  explicit Expanded(const Columns& columns, bool keeps_accesses = false);

  const Template code;
  std::vector<Class> classes;
  std::vector<Rank> ranks;
  std::vector<Tracked> tracked;
  Column peers, peer_start;  // per rank: (peer position, tag) of each send and recv in order
  i64 num_ops = 0;

  const Class& of(i64 rank) const { return classes[static_cast<size_t>(ranks[static_cast<size_t>(rank)].of_class)]; }
  const ClassOp& op(i64 rank, i64 index) const { return of(rank).ops[static_cast<size_t>(index)]; }
  const OpRow& row(i64 rank, i64 index) const { return code.ops[static_cast<size_t>(op(rank, index).row)]; }
};

// Numbers the ops of all ranks. By rank: those of a rank follow each other, as results list them. By index: ops of one
// index on all ranks that have as many ops follow each other. In a regular program they run at one time, so that what is
// touched together lies together.
class Numbering {
 public:
  static Numbering by_rank(const Expanded& program);
  static Numbering by_index(const Expanded& program);

  u32 of(i64 rank, i64 index) const {
    const Line& line = lines_[static_cast<size_t>(rank)];
    return static_cast<u32>(line.first + index * line.stride);
  }
  // The number of another op of the same rank, given how many ops later it comes.
  u32 later(u32 op, i64 rank, i64 distance) const {
    return static_cast<u32>(op + distance * lines_[static_cast<size_t>(rank)].stride);
  }

 private:
  struct Line {
    i64 first, stride;
  };
  std::vector<Line> lines_;
};

}  // namespace meshweave
