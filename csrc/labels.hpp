// A run of a program on index labels (`ir.analysis.labels`, `ir.analysis.call_labels`): whether each output is what the
// program declares. Where it is not, or where only the reference knows, it ends in a Doubt.
#pragma once

#include "shapes.hpp"
#include "terms.hpp"

namespace meshweave {

// A part of a tensor that a declared function reads or makes: per dim the number of a name, -1 for the whole dim.
struct TensorPart {
  i64 tensor;
  bool is_running;  // an input that is the reduction so far
  std::vector<i64> dims;
};

struct FunctionRow {
  TensorPart part;
  i64 function, output, reduction;  // reduction -1: none
  std::vector<TensorPart> ins, stash;
  std::vector<std::pair<i64, i64>> reduced;  // names that are reduced over, with their sizes
};

// The inputs that parts of a stage saw before: those of the forward part, then of the input gradient.
struct Stashed {
  std::vector<Block> inputs;
  size_t from_forward = 0;
};

// What is known of a buffer that holds a tensor.
struct HeldTensor {
  i64 tensor = -1;  // -1: scratch
  bool is_input = false, has_partial = false, is_declared = false;
};

class LabelRun {
 public:
  LabelRun(const ShapeRules& rules, const Columns& columns);

  // Executes an op, or all members of a collective, or a send and its recv.
  void run(const std::vector<OpView>& members, const std::vector<i64>& stash);
  // Each output, its parts on several ranks combined, is the finished tensor at its own positions.
  void check_outputs() const;

 private:
  using Positions = std::vector<i64>;
  using Lists = std::vector<Positions>;

  void read_shards(const Columns& columns);
  void read_functions(const Columns& columns);
  void make_memory();
  size_t area(i64 buffer, i64 rank) const { return static_cast<size_t>(rank * num_buffers_ + buffer); }
  const Lists& shard(i64 buffer, i64 rank) const;
  Block elements(i64 tensor, const Lists& lists, i32 term) const;
  Block expected(const OpView& op, const Access& view) const;
  Block& memory(const OpView& op, const Access& view);
  Block read(const OpView& op, const Access& view);
  void write(const OpView& op, const Access& view, const Block& value, bool update = false);

  void matmul(const OpView& op);
  void collective(const std::vector<OpView>& members);
  void all_to_all(const std::vector<OpView>& members);
  Block reduced(const std::vector<OpView>& members);

  void call(const OpView& op, const std::vector<i64>& stash);
  const FunctionRow* best(i64 function, i64 output, const std::vector<Block>& ins) const;
  Block apply(const FunctionRow& row, const OpView& op, const Access& view, const std::vector<Block>& ins,
              const Stashed* stashed);
  Block result(const FunctionRow& row, const OpView& op, const Access& view, const std::map<i64, Positions>& names);
  void bind(const TensorPart& part, const Block& block, std::map<i64, Positions>& names) const;
  void check_running(const std::vector<std::pair<i64, const Block*>>& running) const;
  Block trusted(const OpView& op, const Access& view) const;
  void check_trusted_input(const OpView& op, const Access& view, const Block& block) const;

  const ShapeRules& rules_;
  const Columns& columns_;
  mutable Terms terms_;
  i64 num_buffers_;
  std::vector<HeldTensor> held_;        // by buffer
  std::vector<i64> first_;              // per rank and buffer: its first block of memory, -1 for none
  std::vector<i64> shard_of_;           // per rank and buffer: its shard, -1 for none
  std::vector<Lists> shards_;
  std::vector<Block> memory_;
  std::vector<FunctionRow> functions_;
  std::map<std::vector<i64>, Stashed> stashes_;
  i64 stashed_ = 0;  // elements in them
};

}  // namespace meshweave
