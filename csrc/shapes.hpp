// Which shapes, dtypes and member numbers fit together (`ir.analysis.shapes`). What does not fit is a Doubt.
#pragma once

#include "blocks.hpp"
#include "expand.hpp"

namespace meshweave {

// What the proof needs to know of an op of the template beyond its `OpRow`.
struct ProofRow {
  i64 name;       // for people; members of a collective agree in it
  i64 reduction;  // as `Reduction`; -1 for none
  i64 dim;        // along which an all-to-all concatenates
  i64 recv_mode, recv_sizes;  // of an all-to-all; 0: equal parts, 2: a list in `lists`
  i64 function;   // number of what a call runs; -1 for other ops
  i64 step;       // of a permute: the collective that it is a step of, as one number
  i64 outs;       // results of a call
};

// An op of one rank with its resolved views.
struct OpView {
  const OpRow* row;
  const ProofRow* proof;
  const ClassOp* op;
  const Class* of;
  const Access* views;  // in the order of `Op.accesses`
  size_t num_views;
  i64 rank;

  const Access& view(size_t at) const {
    trust(at < num_views);
    return views[at];
  }
  const Access& out() const { return view(num_views - 1); }
  i64 owner(const Access& of_view) const { return of_view.rank < 0 ? rank : of_view.rank; }
};

// What ops are checked against.
struct ShapeRules {
  const Template& code;
  const std::vector<i64>& dtypes;  // by buffer
  i64& blocks_left;

  i64 dtype(const Access& view) const { return dtypes[static_cast<size_t>(view.buffer)]; }
  // The sizes of the parts of `count` members along a dim of `total` elements.
  std::vector<i64> part_sizes(const OpView& op, i64 total, size_t count) const;
  std::vector<i64> recv_sizes(const OpView& op, i64 total, size_t count) const;
  void check_op(const OpView& op) const;
  void check_collective(const std::vector<OpView>& members) const;
  void check_message(const OpView& send, const OpView& recv) const;

 private:
  void check_remote(const OpView& op) const;
  void check_overlaps(const OpView& op) const;
  void check_all_to_all(const std::vector<OpView>& members, const std::vector<Shape>& sources) const;
};

}  // namespace meshweave
