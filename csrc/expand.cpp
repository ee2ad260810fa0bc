#include "expand.hpp"

#include <algorithm>
#include <map>
#include <memory>

#include "alike.hpp"
#include "binder.hpp"
#include "edges.hpp"
#include "walk.hpp"

namespace meshweave {
namespace {

// What the ops of a rank depend on: two ranks that agree in all of it are of one class.
class Keys {
 public:
  explicit Keys(const Template& code) : code_(code) {
    for (const StatementRow& row : code.statements) {
      if (row.type == Statement::REPEAT || row.type == Statement::WHEN) reads_ |= code.expressions.reads(row.expr);
      if (row.type == Statement::ON && row.what >= 0) sets_.push_back(row.what);
    }
    for (const i64 expr : code.shape_exprs) reads_ |= code.expressions.reads(expr);
    for (const SelectorRow& row : code.selectors) {
      add(row.start);
      add(row.stop);
      if (row.blocked) add(row.first), add(row.block), add(row.stride);
    }
    for (const ViewRow& row : code.views) {
      add(row.slot);
      if (row.rank >= 0) reads_ |= variable_bit(0);  // reaches others: a class of its own
    }
    for (const BufferRow& row : code.buffers)
      if (row.set >= 0) sets_.push_back(row.set);
    for (const AccessRow& row : code.accesses) add(row.condition);
    for (const i64 expr : code.args) add(expr);
    for (const OpRow& row : code.ops) {
      if (!is_message(row.kind)) add(row.first), add(row.second);
      if (row.sizes_mode == 1) add(row.sizes);
      add(row.step_index), add(row.flops), add(row.bytes);
      if (row.axis >= 0) axes_.push_back(row.axis);
    }
    std::sort(sets_.begin(), sets_.end());
    sets_.erase(std::unique(sets_.begin(), sets_.end()), sets_.end());
    std::sort(axes_.begin(), axes_.end());
    axes_.erase(std::unique(axes_.begin(), axes_.end()), axes_.end());
  }

  std::vector<i64> of(i64 rank) const {
    std::vector<i64> key;
    if (reads_ & variable_bit(0)) key.push_back(rank);
    for (i64 slot = 0; slot < code_.num_coords; ++slot)
      if (reads_ & variable_bit(2 + slot)) key.push_back(code_.coordinate(rank, slot));
    for (const i64 set : sets_) key.push_back(code_.in_set(set, rank));
    add_groups(rank, key);
    for (const BufferRow& row : code_.buffers)
      if (row.table)
        for (i64 dim = 0; dim < row.dims; ++dim)
          key.push_back(code_.shapes[static_cast<size_t>(row.shape + rank * row.dims + dim)]);
    return key;
  }

  // What `ranks_alike` asks of ranks that it compares.
  std::vector<i64> coarse(i64 rank) const {
    std::vector<i64> key;
    for (const i64 set : sets_) key.push_back(code_.in_set(set, rank));
    add_groups(rank, key);
    return key;
  }

 private:
  void add_groups(i64 rank, std::vector<i64>& key) const {
    for (const i64 axis : axes_) {
      const i64 group = code_.group(axis, rank);
      key.push_back(group < 0 ? 0 : code_.full_size(group));
    }
  }

  void add(i64 expr) {
    if (expr >= 0) reads_ |= code_.expressions.reads(expr);
  }

  const Template& code_;
  u64 reads_ = 0;
  std::vector<i64> sets_, axes_;
};

void order(const Template& code, Edges edges, Class& out) {
  const size_t count = out.ops.size();
  out.before_start = std::move(edges.start);
  out.before = std::move(edges.before);
  out.after_start.assign(count + 1, 0);
  for (const i64 other : out.before) ++out.after_start[static_cast<size_t>(other) + 1];
  for (size_t op = 0; op < count; ++op) out.after_start[op + 1] += out.after_start[op];
  out.after.assign(out.before.size(), 0);
  std::vector<i64> filled = out.after_start;
  for (size_t op = 0; op < count; ++op)
    for (i64 at = out.before_start[op]; at < out.before_start[op + 1]; ++at)
      out.after[static_cast<size_t>(filled[static_cast<size_t>(out.before[static_cast<size_t>(at)])]++)] = static_cast<i64>(op);
  out.lanes.resize(code.lanes.size());
  for (size_t op = 0; op < count; ++op)
    out.lanes[static_cast<size_t>(code.ops[static_cast<size_t>(out.ops[op].row)].lane)].push_back(static_cast<i64>(op));
}

// Finds ranks that run as one that is expanded already, though they read other coordinates.
class Likeness {
 public:
  Likeness(const Template& code, const Keys& keys) : code_(code), keys_(keys) {
    for (i64 rank = 0; rank < code.num_ranks(); ++rank) {
      const auto [found, is_new] = firsts_.try_emplace(keys.of(rank), rank);
      if (is_new) open_[keys.coarse(rank)].push_back(rank);
    }
  }

  // Returns the ranks, the first of each key, that run as this one. It gives up where ranks turn out to be all different.
  std::vector<i64> of(i64 leader) {
    std::vector<i64>& open = open_[keys_.coarse(leader)];
    std::erase_if(open, [&](i64 rank) { return rank <= leader; });
    if (open.empty() || tries_left_ == 0) return {};
    const std::vector<i64> out = ranks_alike(code_, leader, open);
    if (out.empty()) --tries_left_;
    std::erase_if(open, [&](i64 rank) { return std::binary_search(out.begin(), out.end(), rank); });
    return out;
  }

 private:
  const Template& code_;
  const Keys& keys_;
  std::map<std::vector<i64>, i64> firsts_;                // by key, the first rank that has it
  std::map<std::vector<i64>, std::vector<i64>> open_;     // by coarse key, those of no class yet, ascending
  i64 tries_left_ = 2;
};

constexpr size_t MAX_KEPT = size_t{1} << 21;  // accesses and ops of all classes, some hundred bytes each

// Released remote writes: whoever reads or overwrites what arrives waits for it (`ir.edges.tracked_edges`).
struct Release {
  i64 op;
  Access access;
  std::vector<i64> key;
};

}  // namespace

Expanded::Expanded(const Columns& columns, bool keeps_accesses) : code(columns) {
  std::vector<char> exposed(code.buffers.size(), 0);
  for (const AccessRow& row : code.accesses) {
    const ViewRow& view = code.views[static_cast<size_t>(row.view)];
    if (view.rank >= 0) exposed[static_cast<size_t>(view.buffer)] = 1;
  }
  bool has_messages = false, has_tracked = false;
  for (const OpRow& row : code.ops) {
    has_messages |= is_message(row.kind);
    has_tracked |= (row.flags & TRACKED) != 0;
  }
  const Keys keys(code);
  ViewBudget budget;
  std::map<std::vector<i64>, i64> known;
  std::vector<std::vector<Release>> arriving(has_tracked ? static_cast<size_t>(code.num_ranks()) : 0);
  const bool keeps = keeps_accesses || has_tracked;
  size_t num_kept = 0;
  const bool reaches = std::any_of(code.views.begin(), code.views.end(), [](const ViewRow& view) { return view.rank >= 0; });
  // Who keeps accesses wants those of each rank, not of one like it.
  std::unique_ptr<Likeness> likeness;
  if (!keeps && !reaches) likeness = std::make_unique<Likeness>(code, keys);
  std::vector<std::vector<std::vector<i64>>> kept_keys;  // of every rank, where writes are tracked
  Accesses spare;  // memory of those of a class before
  for (i64 rank = 0; rank < code.num_ranks(); ++rank) {
    const i64 global = code.ranks[static_cast<size_t>(rank)];
    const auto [found, is_new] = known.try_emplace(keys.of(rank), static_cast<i64>(classes.size()));
    if (is_new) {
      Binder binder(code, rank, std::move(spare));
      std::vector<std::vector<i64>> op_keys;
      try {
        walk(code, rank, [&](i64 row, const std::vector<i64>& env, const std::vector<i64>& key) {
          if (num_ops + static_cast<i64>(binder.ops.size()) >= code.max_ops)
            throw ProgramFault("the program has more than " + std::to_string(code.max_ops) + " ops");
          binder(row, env);
          if (has_tracked) op_keys.push_back(key);
        });
        Class made;
        made.ops = std::move(binder.ops);
        made.sizes = std::move(binder.sizes);
        order(code, local_edges(code, binder.accesses, exposed, budget), made);
        num_kept += binder.accesses.all.size() + binder.accesses.row.size();
        if (keeps_accesses && num_kept > MAX_KEPT) throw ProgramFault("the program has too many different accesses");
        (keeps ? made.accesses : spare) = std::move(binder.accesses);
        classes.push_back(std::move(made));
      } catch (ProgramFault& fault) {
        if (fault.rank < 0) throw ProgramFault(fault.what(), global, static_cast<i64>(binder.accesses.row.size()));
        throw;
      }
      if (has_tracked) kept_keys.push_back(std::move(op_keys));
      if (likeness)
        for (const i64 other : likeness->of(rank)) known.emplace(keys.of(other), found->second);
    }
    ranks.push_back({found->second, num_ops});
    num_ops += static_cast<i64>(classes[static_cast<size_t>(found->second)].ops.size());
    if (num_ops > code.max_ops) throw ProgramFault("the program has more than " + std::to_string(code.max_ops) + " ops");
  }
  if (has_tracked) {  // here every rank that reaches others is a class of its own
    const auto each = [&](i64 rank, auto&& visit) {
      const auto number = static_cast<size_t>(ranks[static_cast<size_t>(rank)].of_class);
      const Accesses& kept = classes[number].accesses;
      for (size_t op = 0; op < kept.row.size(); ++op)
        for (i64 at = kept.start[op]; at < kept.start[op + 1]; ++at)
          visit(ranks[static_cast<size_t>(rank)].base + static_cast<i64>(op), kept.row[op],
                kept.all[static_cast<size_t>(at)], kept_keys[number][op]);
    };
    for (i64 rank = 0; rank < code.num_ranks(); ++rank)
      each(rank, [&](i64 op, i64 row, const Access& access, const std::vector<i64>& key) {
        if ((code.ops[static_cast<size_t>(row)].flags & TRACKED) && access.rank >= 0 && access.mode != Mode::READ)
          arriving[static_cast<size_t>(access.rank)].push_back({op, access, key});
      });
    for (i64 rank = 0; rank < code.num_ranks(); ++rank)
      each(rank, [&](i64 op, i64, const Access& access, const std::vector<i64>& key) {
        if (access.rank >= 0) return;
        budget.spend_pairs(arriving[static_cast<size_t>(rank)].size());
        for (const Release& write : arriving[static_cast<size_t>(rank)])
          if (write.access.buffer == access.buffer && write.access.slot == access.slot && write.key < key &&
              !(access.mode == Mode::UPDATE && write.access.mode == Mode::UPDATE) && overlap(access, write.access, budget.blocks_left)) {
            budget.spend_edges(1);
            tracked.push_back({write.op, op});
          }
      });
    const auto less = [](const Tracked& a, const Tracked& b) { return a.from != b.from ? a.from < b.from : a.to < b.to; };
    std::sort(tracked.begin(), tracked.end(), less);
    tracked.erase(std::unique(tracked.begin(), tracked.end(),
                              [](const Tracked& a, const Tracked& b) { return a.from == b.from && a.to == b.to; }),
                  tracked.end());
  }
  if (!keeps_accesses)
    for (Class& one : classes) one.accesses = Accesses();
  peer_start.push_back(0);
  for (i64 rank = 0; rank < code.num_ranks(); ++rank) {
    if (has_messages)
      walk(code, rank, [&](i64 number, const std::vector<i64>& env, const std::vector<i64>&) {
        const OpRow& row = code.ops[static_cast<size_t>(number)];
        if (!is_message(row.kind)) return;
        const i64 peer = code.expressions.evaluate(row.first, env);
        const auto at = std::lower_bound(code.ranks.begin(), code.ranks.end(), peer);
        const i64 global = code.ranks[static_cast<size_t>(rank)];
        if (at == code.ranks.end() || *at != peer || peer == global)
          throw ProgramFault("peer " + std::to_string(peer) + " is no other rank of the program", global);
        peers.push_back(at - code.ranks.begin());
        peers.push_back(code.expressions.evaluate(row.second, env));
      });
    peer_start.push_back(static_cast<i64>(peers.size()));
  }
}

Numbering Numbering::by_rank(const Expanded& program) {
  Numbering out;
  for (const Rank& rank : program.ranks) out.lines_.push_back({rank.base, 1});
  return out;
}

Numbering Numbering::by_index(const Expanded& program) {
  // Also of several classes, where they have as many ops: they differ in sizes and not in what they do.
  std::map<size_t, i64> num_ranks, first;
  for (i64 rank = 0; rank < program.code.num_ranks(); ++rank) ++num_ranks[program.of(rank).ops.size()];
  i64 total = 0;
  for (const auto& [num_ops, count] : num_ranks) first[num_ops] = total, total += count * static_cast<i64>(num_ops);
  Numbering out;
  for (i64 rank = 0; rank < program.code.num_ranks(); ++rank) {
    const size_t num_ops = program.of(rank).ops.size();
    out.lines_.push_back({first[num_ops]++, num_ranks[num_ops]});
  }
  return out;
}

}  // namespace meshweave
