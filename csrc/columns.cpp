#include "columns.hpp"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "views.hpp"

namespace meshweave {
namespace {

constexpr i64 MAX_RANKS = 1 << 20;
constexpr i64 MAX_VARS = 1 << 16;
constexpr u64 MAX_TABLE = u64{1} << 28;  // entries of what is kept per rank and set, or per rank and lane

[[noreturn]] void bad(const std::string& what) { throw BadInput("columns: " + what); }

void check(bool condition, const char* what) {
  if (!condition) bad(what);
}

i64 scalar(const Columns& columns, const char* name, i64 low, i64 high) {
  const Column& values = column(columns, name);
  if (values.size() != 1 || values[0] < low || values[0] > high) bad(std::string("bad ") + name);
  return values[0];
}

// Rows of structs that hold nothing but 64-bit fields.
template <class Row>
std::vector<Row> rows(const Columns& columns, const char* name) {
  static_assert(std::is_trivially_copyable_v<Row> && sizeof(Row) % sizeof(i64) == 0);
  const Column& values = column(columns, name);
  constexpr size_t width = sizeof(Row) / sizeof(i64);
  if (values.size() % width != 0) bad(std::string(name) + " is not in rows");
  std::vector<Row> out(values.size() / width);
  if (!out.empty()) std::memcpy(out.data(), values.data(), values.size() * sizeof(i64));
  return out;
}

bool below(i64 value, size_t count) { return value >= 0 && value < static_cast<i64>(count); }
bool none_or_below(i64 value, size_t count) { return value == -1 || below(value, count); }

const Column& offsets(const Columns& columns, const char* name, size_t total) {
  const Column& values = column(columns, name);
  if (values.empty() || values.front() != 0 || values.back() != static_cast<i64>(total) ||
      !std::is_sorted(values.begin(), values.end()))
    bad(std::string("bad offsets in ") + name);
  return values;
}

}  // namespace

const Column& column(const Columns& columns, const char* name) {
  const auto found = columns.find(name);
  if (found == columns.end()) bad(std::string("no ") + name);
  return found->second;
}

Template::Template(const Columns& c)
    : ranks(column(c, "ranks")),
      num_coords(scalar(c, "num_coords", 0, 4096)),
      num_vars(scalar(c, "num_vars", 2 + num_coords, MAX_VARS)),
      num_sets(scalar(c, "num_sets", 0, 1 << 20)),
      num_axes(scalar(c, "num_axes", 0, 1 << 20)),
      max_ops(scalar(c, "max_ops", 1, i64{1} << 31)),
      coords(column(c, "coords")),
      shapes(column(c, "shapes")),
      shape_exprs(column(c, "shape_exprs")),
      lists(column(c, "lists")),
      list_offsets(offsets(c, "list_offsets", lists.size())),
      args(column(c, "args")),
      expressions(column(c, "code"), column(c, "exprs"), column(c, "tables"), column(c, "entries"), num_vars),
      axis_group(column(c, "axis_group")),
      groups(offsets(c, "groups", column(c, "members").size())),
      group_price(column(c, "group_price")),
      group_copies(column(c, "group_copies")),
      members(column(c, "members")),
      statements(rows<StatementRow>(c, "statements")),
      selectors(rows<SelectorRow>(c, "selectors")),
      views(rows<ViewRow>(c, "views")),
      buffers(rows<BufferRow>(c, "buffers")),
      ops(rows<OpRow>(c, "ops")),
      accesses(rows<AccessRow>(c, "accesses")),
      op_access(offsets(c, "op_access", accesses.size())),
      lanes(rows<LaneRow>(c, "lanes")) {
  const auto num_ranks_ = ranks.size();
  const auto is_expr = [this](i64 expr) { return expr >= 0 && expr < expressions.size(); };
  check(num_ranks_ >= 1 && num_ranks_ <= MAX_RANKS, "bad number of ranks");
  check(std::is_sorted(ranks.begin(), ranks.end()) && ranks.front() >= 0, "ranks are not ascending");
  check(std::adjacent_find(ranks.begin(), ranks.end()) == ranks.end(), "a rank repeats");
  check(coords.size() == num_ranks_ * static_cast<size_t>(num_coords), "coords do not fit the ranks");

  const size_t num_groups = groups.size() - 1;
  for (const i64 rank : members) check(below(rank, num_ranks_), "a member that is no rank");
  check(axis_group.size() == static_cast<size_t>(num_axes) * num_ranks_, "axis_group does not fit");
  for (const i64 group_ : axis_group) check(none_or_below(group_, num_groups), "an unknown group");
  check(group_price.size() == num_groups, "group_price does not fit");
  check(group_copies.size() == num_groups, "group_copies does not fit");
  for (const i64 copies : group_copies) check(copies >= 1 && copies <= static_cast<i64>(MAX_RANKS), "a bad number of copies");
  axis_place.assign(axis_group.size(), -1);
  std::vector<i64> placed(num_groups, -1);  // the last axis for which the members of a group were placed
  for (i64 axis = 0; axis < num_axes; ++axis)
    for (i64 rank = 0; rank < num_ranks(); ++rank) {
      const i64 group_ = group(axis, rank);
      if (group_ < 0) continue;
      if (placed[static_cast<size_t>(group_)] != axis) {
        placed[static_cast<size_t>(group_)] = axis;
        for (i64 at = 0; at < group_size(group_); ++at) {
          if (group(axis, member(group_, at)) != group_) continue;
          i64& place_ = axis_place[static_cast<size_t>(axis * num_ranks() + member(group_, at))];
          check(place_ < 0, "a group with a rank twice");
          place_ = at;
        }
      }
      check(place(axis, rank) >= 0, "a group without its rank");
    }

  const Column& set_ranks = column(c, "set_ranks");
  const Column& sets = offsets(c, "sets", set_ranks.size());
  check(sets.size() == static_cast<size_t>(num_sets) + 1, "sets do not fit");
  check(static_cast<u64>(num_sets) * num_ranks_ <= MAX_TABLE, "too many sets of so many ranks");
  check(lanes.size() * num_ranks_ <= MAX_TABLE, "too many lanes of so many ranks");
  in_sets.assign(static_cast<size_t>(num_sets) * num_ranks_, 0);
  for (size_t set = 0; set + 1 < sets.size(); ++set)
    for (i64 at = sets[set]; at < sets[set + 1]; ++at) {
      check(below(set_ranks[static_cast<size_t>(at)], num_ranks_), "a set with what is no rank");
      in_sets[set * num_ranks_ + static_cast<size_t>(set_ranks[static_cast<size_t>(at)])] = 1;
    }

  std::vector<i64> open;  // ends of the bodies around a statement
  for (size_t at = 0; at < statements.size(); ++at) {
    const StatementRow& row = statements[at];
    const auto number = static_cast<i64>(at);
    while (!open.empty() && open.back() == number) open.pop_back();
    const auto type = static_cast<i64>(row.type);
    check(type >= 0 && type <= 3, "an unknown statement");
    check(row.end > number && row.end <= static_cast<i64>(statements.size()), "a body that ends nowhere");
    check(open.empty() || row.end <= open.back(), "bodies that cross");
    check(open.size() < 64, "statements nested too deep");
    if (row.type == Statement::OP) check(below(row.what, ops.size()) && row.end == number + 1, "a bad op statement");
    if (row.type == Statement::ON) check(none_or_below(row.what, static_cast<size_t>(num_sets)), "an unknown set");
    if (row.type == Statement::REPEAT)
      check(row.what >= 2 + num_coords && row.what < num_vars, "a loop variable that is none");
    if (row.type == Statement::REPEAT || row.type == Statement::WHEN)
      check(is_expr(row.expr), "a statement without its expression");
    if (row.type != Statement::OP && row.end > number + 1) open.push_back(row.end);
  }

  for (const BufferRow& row : buffers) {
    check(row.itemsize >= 1 && row.itemsize <= 64, "a bad item size");
    check(row.slots >= 1 && row.slots <= 1 << 20 && row.dims >= 0 && row.dims <= MAX_DIMS, "a bad buffer");
    check(none_or_below(row.set, static_cast<size_t>(num_sets)), "a buffer on an unknown set");
    if (row.order) {
      i64 seen = 0;
      for (i64 dim = 0; dim < row.dims; ++dim) seen |= i64{1} << (row.order >> (4 * dim) & 15);
      check(row.order > 0 && seen == (i64{1} << row.dims) - 1, "dims in a bad order");
    }
    const auto width = static_cast<size_t>(row.dims) * (row.table ? num_ranks_ : 1);
    const Column& of = row.table ? shapes : shape_exprs;
    check(row.shape >= 0 && static_cast<u64>(row.shape) + width <= of.size(), "a buffer without its shape");
  }
  for (const i64 expr : shape_exprs) check(is_expr(expr), "a shape that is no expression");
  for (const SelectorRow& row : selectors) {
    check(is_expr(row.start) && (row.stop == -1 || is_expr(row.stop)), "a bad selector");
    if (row.blocked) check(is_expr(row.first) && is_expr(row.block) && is_expr(row.stride), "a bad selector");
  }
  for (const ViewRow& row : views) {
    check(below(row.buffer, buffers.size()), "a view of an unknown buffer");
    check(is_expr(row.slot) && (row.rank == -1 || is_expr(row.rank)), "a bad view");
    check(row.dims == buffers[static_cast<size_t>(row.buffer)].dims, "a view of other dims than its buffer");
    check(row.selectors >= 0 && static_cast<u64>(row.selectors) + static_cast<u64>(row.dims) <= selectors.size(),
          "a view without its selectors");
  }
  for (const AccessRow& row : accesses) {
    check(row.mode >= 0 && row.mode <= 2 && below(row.view, views.size()), "a bad access");
    check(row.condition == -1 || is_expr(row.condition), "an access with a bad condition");
  }
  for (const i64 expr : args) check(is_expr(expr), "an argument that is no expression");
  for (const LaneRow& row : lanes) check(row.width >= 1 && (row.ready == 0 || row.ready == 1), "a bad lane");

  check(op_access.size() == ops.size() + 1, "op_access does not fit");
  for (const OpRow& row : ops) {
    const auto kind = static_cast<i64>(row.kind);
    check(kind >= 0 && kind < static_cast<i64>(Kind::COUNT), "an unknown kind of op");
    check(below(row.lane, lanes.size()), "an unknown lane");
    for (const i64 view : {row.out, row.src, row.other}) check(none_or_below(view, views.size()), "an unknown view");
    check(none_or_below(row.axis, static_cast<size_t>(num_axes)), "an unknown axis");
    for (const i64 expr : {row.first, row.second, row.step_index, row.flops, row.bytes})
      check(expr == -1 || is_expr(expr), "an op with a bad expression");
    check(row.price >= -1, "a bad price");
    check(row.rate >= ((row.kind == Kind::MATMUL || row.kind == Kind::CALL) ? 0 : -1), "a bad rate");
    check(row.comm >= -1 && row.comm < static_cast<i64>(Comm::COUNT), "an unknown kind of communication");
    check(row.step_directions == 1 || row.step_directions == 2, "a step of neither one nor two directions");
    check(row.sizes_mode >= 0 && row.sizes_mode <= 2, "bad sizes");
    if (row.sizes_mode == 1) check(is_expr(row.sizes), "bad sizes");
    if (row.sizes_mode == 2) check(row.sizes >= 0 && row.sizes < static_cast<i64>(list_offsets.size()) - 1, "bad sizes");
    const auto num_exprs = static_cast<i64>(args.size());
    check(row.num_args >= 0 && row.args >= 0 && row.args <= num_exprs && row.num_args <= num_exprs - row.args &&
              row.num_work_sizes >= 0 && row.num_work_sizes <= num_exprs - row.args - row.num_args, "bad arguments");
    check(row.stash >= -1 && row.part >= 0 && row.part <= 5, "a bad stash");
    const bool moves = is_collective(row.kind) && row.kind != Kind::FENCE && row.kind != Kind::EXCHANGE;
    const bool needs_out = moves || row.kind <= Kind::ZERO || row.kind == Kind::RECV || is_one_sided(row.kind);
    const bool needs_src = moves || row.kind == Kind::MATMUL || row.kind == Kind::SEND || is_one_sided(row.kind);
    check(!needs_out || row.out >= 0, "an op without its out");
    check(!needs_src || row.src >= 0, "an op without its src");
    check(row.kind != Kind::MATMUL || row.other >= 0, "a product without b");
    check(!is_collective(row.kind) || row.axis >= 0, "a collective without an axis");
    check(!is_message(row.kind) || (row.first >= 0 && row.second >= 0), "a message without peer or tag");
    check(row.kind != Kind::PERMUTE || row.first >= 0, "a permute without shift");
    if (row.kind == Kind::BROADCAST || row.kind == Kind::REDUCE)
      check(row.first >= 0 && row.second >= 0, "a chain without root or packets");
    check(row.comm == -1 || row.step_index >= 0, "a step without its index");
    if (row.kind == Kind::MATMUL) {
      for (const i64 view : {row.out, row.src, row.other})
        check(views[static_cast<size_t>(view)].dims >= 2, "a product of what is no matrix");
    } else if (row.kind == Kind::ALL_GATHER || row.kind == Kind::REDUCE_SCATTER || row.kind == Kind::ALL_TO_ALL) {
      const i64 view = row.kind == Kind::ALL_GATHER ? row.out : row.src;
      check(below(row.dim, static_cast<size_t>(views[static_cast<size_t>(view)].dims)), "a collective along no dim");
    }
  }
}

}  // namespace meshweave
