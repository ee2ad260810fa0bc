// A program template in columns, as `simulate/columns.py` writes it. The constructor checks every index once, so
// that later readers need no checks.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "expr.hpp"

namespace meshweave {

using Column = std::vector<i64>;
using Columns = std::map<std::string, Column>;

enum class Kind : i64 {
  MATMUL, COPY, ADD, ZERO, CALL, ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST, REDUCE, ALL_TO_ALL, PERMUTE,
  EXCHANGE, FENCE, SEND, RECV, GET, PUT, ACCUMULATE, COUNT
};

inline bool is_collective(Kind kind) { return kind >= Kind::ALL_GATHER && kind <= Kind::FENCE; }
inline bool is_message(Kind kind) { return kind == Kind::SEND || kind == Kind::RECV; }
inline bool is_one_sided(Kind kind) { return kind >= Kind::GET && kind <= Kind::ACCUMULATE; }

// Kinds of communication that have constants of their own, in the order of `describe.machine.links.COMM_KINDS`.
enum class Comm : i64 {
  ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST, REDUCE, ALL_TO_ALL, SEND_RECV, ACCUMULATE, COUNT
};

// VIEW_BYTES: a call moves the bytes of its views.
enum Flag : i64 { TRANSPOSE_A = 1, TRANSPOSE_B = 2, TRACKED = 4, UPDATES = 8, VIEW_BYTES = 16, JOINS = 32 };

enum class Statement : i64 { OP, ON, REPEAT, WHEN };

struct StatementRow {
  Statement type;
  i64 what;   // op, set, loop variable; unused in WHEN
  i64 expr;   // count or condition
  i64 end;    // number of the statement after the body
};

struct SelectorRow {
  i64 blocked, start, stop, first, block, stride;  // expressions; stop -1: the end of the dim
};

struct ViewRow {
  i64 buffer, slot, rank, selectors, dims;  // rank -1: the executing one
};

struct BufferRow {
  i64 itemsize, slots, dims, set, table, shape;  // set -1: on every rank; table: shape is a column of `shapes`
  i64 order;  // the dims from the outermost in memory, 4 bits each, the innermost in the lowest; 0: as written
};

struct OpRow {
  Kind kind;
  i64 lane, out, src, other;  // views, -1 for none; a product has a in src and b in other
  i64 flags, axis, dim;
  i64 first, second;          // peer and tag; shift; root and packets (expressions, -1 for none)
  i64 sizes_mode, sizes;      // 0: equal parts; 1: an expression in `peer`; 2: a list in `lists`
  i64 comm, step_index, step_directions;  // comm -1: no step of a lowered collective
  i64 price;  // row of constants of an op that is no collective, else -1
  i64 flops, bytes, stash, part, args, num_args;
  i64 rate;  // of the machine's FLOP rates, for a product or a call; -1 for others
  i64 num_work_sizes;  // of a call: so many expressions in `args`, after its arguments, are the sizes of its work
};

struct AccessRow {
  i64 mode, view, condition;  // condition -1: always
};

struct LaneRow {
  i64 ready, width;
};

struct Template {
  explicit Template(const Columns& columns);

  i64 num_ranks() const { return static_cast<i64>(ranks.size()); }
  i64 coordinate(i64 rank, i64 slot) const { return coords[static_cast<size_t>(rank * num_coords + slot)]; }
  // Return the group of a rank along an axis, and the rank's place in it; -1 if it has none.
  i64 group(i64 axis, i64 rank) const { return axis_group[static_cast<size_t>(axis * num_ranks() + rank)]; }
  i64 place(i64 axis, i64 rank) const { return axis_place[static_cast<size_t>(axis * num_ranks() + rank)]; }
  i64 group_size(i64 group) const {
    return groups[static_cast<size_t>(group) + 1] - groups[static_cast<size_t>(group)];
  }
  // The members of a folded group with all its images.
  i64 full_size(i64 group) const { return group_size(group) * group_copies[static_cast<size_t>(group)]; }
  bool is_folded(i64 group) const { return group_copies[static_cast<size_t>(group)] > 1; }
  i64 member(i64 group, i64 place) const { return members[static_cast<size_t>(groups[static_cast<size_t>(group)] + place)]; }
  bool in_set(i64 set, i64 rank) const {
    return set < 0 || in_sets[static_cast<size_t>(set * num_ranks() + rank)] != 0;
  }

  Column ranks;  // global numbers, ascending; all other columns name a rank by its position here
  i64 num_coords, num_vars, num_sets, num_axes, max_ops;
  Column coords, shapes, shape_exprs, lists, list_offsets, args;
  Expressions expressions;
  Column axis_group, axis_place, groups, group_price, group_copies, members;
  std::vector<char> in_sets;
  std::vector<StatementRow> statements;
  std::vector<SelectorRow> selectors;
  std::vector<ViewRow> views;
  std::vector<BufferRow> buffers;
  std::vector<OpRow> ops;
  std::vector<AccessRow> accesses;
  Column op_access;
  std::vector<LaneRow> lanes;
};

// A named column; raises BadInput where it is missing.
const Column& column(const Columns& columns, const char* name);

}  // namespace meshweave
