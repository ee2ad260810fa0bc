#include "expr.hpp"

#include <algorithm>

namespace meshweave {
namespace {

constexpr i64 MAX_STACK = 64;
constexpr i64 MAX_DEPTH = 64;        // of tables within tables
constexpr i64 MAX_COST = 1 << 16;    // tokens read to evaluate an expression, its tables' entries included

void check_offsets(const std::vector<i64>& offsets, i64 total, const char* message) {
  require(!offsets.empty() && offsets.front() == 0 && offsets.back() == total, message);
  require(std::is_sorted(offsets.begin(), offsets.end()), message);
}

i64 apply(Code code, i64 a, i64 b) {
  i64 out;
  if (applied(code, a, b, out)) return out;
  throw ProgramFault((code == Code::FLOOR_DIV || code == Code::MOD) && b == 0 ? "division by zero"
                                                                              : "a number exceeds 64 bits");
}

}  // namespace

Expressions::Expressions(const std::vector<i64>& code, std::vector<i64> starts, std::vector<i64> tables,
                         std::vector<i64> entries, i64 num_vars)
    : starts_(std::move(starts)), tables_(std::move(tables)), entries_(std::move(entries)) {
  require(code.size() % 2 == 0, "expressions: code is not in pairs");
  check_offsets(starts_, static_cast<i64>(code.size() / 2), "expressions: bad starts");
  check_offsets(tables_, static_cast<i64>(entries_.size()), "expressions: bad tables");
  require(num_vars >= 2 && num_vars <= 1 << 20, "expressions: bad number of variables");
  tokens_.reserve(code.size() / 2);
  for (size_t at = 0; at < code.size(); at += 2) {
    require(code[at] >= 0 && code[at] < static_cast<i64>(Code::COUNT), "expressions: unknown code");
    tokens_.push_back({static_cast<Code>(code[at]), code[at + 1]});
  }
  reads_.reserve(static_cast<size_t>(size()));
  // Of all entries of a table: which variables they read, the last of them, and the most that one asks for.
  struct Table {
    i64 last = -1, depth = 0, cost = 0;
    u64 reads = 0;
    bool is_known = false;
  };
  std::vector<Table> known(tables_.size());
  std::vector<i64> depths, costs;
  for (i64 expr = 0; expr < size(); ++expr) {
    i64 depth = 0, nested = 0, cost = 0;
    u64 reads = 0;
    for (i64 at = starts_[static_cast<size_t>(expr)]; at < starts_[static_cast<size_t>(expr) + 1]; ++at) {
      const Token& token = tokens_[static_cast<size_t>(at)];
      ++cost;
      if (token.code == Code::CONSTANT) {
        ++depth;
      } else if (token.code == Code::VARIABLE) {
        require(token.argument >= 0 && token.argument < num_vars, "expressions: unknown variable");
        reads |= variable_bit(token.argument);
        ++depth;
      } else if (token.code == Code::SELECT) {
        require(depth >= 1, "expressions: a select without an index");
        const i64 table = token.argument;
        require(table >= 0 && table < static_cast<i64>(tables_.size()) - 1, "expressions: unknown table");
        Table& of = known[static_cast<size_t>(table)];
        for (i64 e = tables_[static_cast<size_t>(table)]; !of.is_known && e < tables_[static_cast<size_t>(table) + 1]; ++e) {
          const i64 entry = entries_[static_cast<size_t>(e)];
          require(entry >= 0 && entry < expr, "expressions: a table entry that comes later");
          of.last = std::max(of.last, entry);
          of.depth = std::max(of.depth, depths[static_cast<size_t>(entry)]);
          of.cost = std::max(of.cost, costs[static_cast<size_t>(entry)]);
          of.reads |= reads_[static_cast<size_t>(entry)];
        }
        of.is_known = true;
        require(of.last < expr, "expressions: a table entry that comes later");
        reads |= of.reads;
        nested = std::max(nested, of.depth + 1);
        cost += of.cost;
      } else {
        require(depth >= 2, "expressions: an operation without operands");
        --depth;
      }
      require(depth <= MAX_STACK && nested <= MAX_DEPTH, "expressions: too deep");
      require(cost <= MAX_COST, "expressions: too long");
    }
    require(depth == 1, "expressions: not one value");
    reads_.push_back(reads);
    depths.push_back(nested);
    costs.push_back(cost);
  }
  for (size_t table = 0; table + 1 < tables_.size(); ++table)
    has_constants_.push_back(std::all_of(
        entries_.begin() + tables_[table], entries_.begin() + tables_[table + 1], [this](i64 entry) {
          return entry >= 0 && entry < size() && end(entry) - begin(entry) == 1 && begin(entry)->code == Code::CONSTANT;
        }));
}

i64 Expressions::evaluate(i64 expr, const std::vector<i64>& env) const {
  const auto start = static_cast<size_t>(starts_[static_cast<size_t>(expr)]);
  if (tokens_[start].code == Code::CONSTANT && starts_[static_cast<size_t>(expr) + 1] == static_cast<i64>(start) + 1)
    return tokens_[start].argument;
  return run(expr, env);
}

i64 Expressions::run(i64 expr, const std::vector<i64>& env) const {
  i64 stack[MAX_STACK + 1];
  i64* top = stack;  // one beyond the last value
  const auto stop = static_cast<size_t>(starts_[static_cast<size_t>(expr) + 1]);
  for (auto at = static_cast<size_t>(starts_[static_cast<size_t>(expr)]); at < stop; ++at) {
    const Token& token = tokens_[at];
    if (token.code == Code::CONSTANT) {
      *top++ = token.argument;
    } else if (token.code == Code::VARIABLE) {
      const i64 value = env[static_cast<size_t>(token.argument)];
      if (value == UNDEFINED) throw ProgramFault("an expression names what has no value here");
      *top++ = value;
    } else if (token.code == Code::SELECT) {
      const i64 first = tables_[static_cast<size_t>(token.argument)];
      const i64 count = tables_[static_cast<size_t>(token.argument) + 1] - first;
      const i64 index = top[-1];
      if (index < 0 || index >= count) throw ProgramFault("a table has no entry " + std::to_string(index));
      top[-1] = evaluate(entries_[static_cast<size_t>(first + index)], env);
    } else {
      --top;
      top[-1] = apply(token.code, top[-1], top[0]);
    }
  }
  return stack[0];
}

}  // namespace meshweave
