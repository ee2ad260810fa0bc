// Reads the statements of a program, which are Python objects, into rows of integers (`ir.columns.template`).
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "error.hpp"

namespace meshweave {

// A column that Python and the core append to.
struct Rows {
  std::vector<i64> values;

  void extend(nanobind::handle numbers);
};

// Appends the rows of all statements of `body` to the columns of `writer`, a `TemplateColumns`. Plain moves and
// messages are written here. All other ops are left to its method `describe_op`.
void read_statements(nanobind::object writer, nanobind::handle body);

}  // namespace meshweave
