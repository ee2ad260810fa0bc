// A run of a program on index labels (`ir.analysis.labels`), for programs of products, moves and sums. It only says whether
// all is well: where it is not, the reference in Python runs again and finds the words.
#pragma once

#include <vector>

#include "columns.hpp"
#include "views.hpp"

namespace meshweave {

// Takes the columns that `ir/analysis/native_labels.py` writes. Raises BadInput where these describe no program.
bool labels_hold(const Columns& columns);

}  // namespace meshweave
