#include "reader.hpp"

#include <nanobind/stl/string.h>

#include <optional>
#include <unordered_map>

#include "columns.hpp"

namespace meshweave {

namespace nb = nanobind;

namespace {

constexpr size_t OP_FIELDS = sizeof(OpRow) / sizeof(i64), STATEMENT = 4, SELECTOR = 6, VIEW = 5, ACCESS = 3;
constexpr i64 OP = 0, ON = 1, REPEAT = 2, WHEN = 3;
constexpr i64 READ = 0, WRITE = 1;
constexpr i64 UPDATES = 8;
// Places in the row of an op; `ir.columns.op_fields` names them all.
constexpr size_t LANE = 1, OUT = 2, SRC = 3, FLAGS = 5, FIRST = 8, SECOND = 9, PRICE = 15, FIRST_ARG = 20;

nb::object attribute(nb::handle of, nb::handle name) {
  PyObject* const value = PyObject_GetAttr(of.ptr(), name.ptr());
  if (!value) throw nb::python_error();
  return nb::steal(value);
}

// An attribute name, made once.
struct Name {
  explicit Name(const char* text) : object(nb::steal(PyUnicode_InternFromString(text))) {}
  nb::object object;
};

std::optional<i64> integer(nb::handle value) {
  if (!PyLong_Check(value.ptr())) return std::nullopt;
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  if (overflow) return std::nullopt;
  return number;
}

i64 required(nb::handle value) {
  const long long number = PyLong_AsLongLong(value.ptr());
  if (number == -1 && PyErr_Occurred()) throw nb::python_error();
  return number;
}

// The number under which a dict knows a name.
std::optional<i64> known(nb::handle dict, nb::handle key) {
  PyObject* const value = PyDict_GetItemWithError(dict.ptr(), key.ptr());
  if (!value && PyErr_Occurred()) throw nb::python_error();
  return value ? integer(nb::handle(value)) : std::nullopt;
}

struct Depth {
  ~Depth() { Py_LeaveRecursiveCall(); }
};

class StatementReader {
 public:
  explicit StatementReader(const nb::object& writer)
      : writer_(writer), lanes_(writer.attr("_lanes")), buffers_(writer.attr("_buffers")), names_(writer.attr("_names")),
        set_(writer.attr("_set")), describe_(writer.attr("describe_op")), slot_of_(writer.attr("_loop_slot")),
        number_of_(writer.attr("expressions").attr("number")), args_(writer.attr("_args")),
        price_(required(writer.attr("price_index")(""))), statements_(rows("_statements")),
        ops_(rows("_op_rows")), views_(rows("_view_rows")), selectors_(rows("_selectors")), accesses_(rows("_accesses")),
        op_access_(rows("_op_access")), proof_(rows("_proof_rows")) {
    const nb::object statements = nb::module_::import_("meshweave.ir.program.statements");
    on_ = statements.attr("On"), repeat_ = statements.attr("Repeat"), when_ = statements.attr("When");
    range_ = nb::module_::import_("meshweave.ir.program.views").attr("Range");
    const nb::object kinds = nb::module_::import_("meshweave.ir.program.ops").attr("OP_TYPES");
    i64 number = 0;
    for (nb::handle kind : kinds) kinds_[nb::cast<std::string>(kind)] = {kinds[kind], number++};
    for (const char* kind : {"copy", "add", "zero", "send", "recv", "get", "put"}) {
      const auto& [type, of] = kinds_.at(kind);
      const std::string name = kind;
      plain_[type.ptr()] = {of, name == "send" || name == "recv", name != "send", name != "recv" && name != "zero",
                            name == "copy" || name == "put", name == "send", name == "recv",
                            name == "send" || name == "get" || name == "put"};
    }
  }

  void read(nb::handle body) {
    const nb::object listed = nb::steal(PySequence_Tuple(body.ptr()));
    if (!listed.is_valid()) throw nb::python_error();
    const Py_ssize_t count = PyTuple_Size(listed.ptr());
    for (Py_ssize_t at = 0; at < count; ++at) statement(PyTuple_GetItem(listed.ptr(), at));
  }

 private:
  // What a plain op has.
  struct Plain {
    i64 kind;
    bool has_peer, writes, reads, may_release, may_step, may_update, names_src;
  };

  std::vector<i64>& rows(const char* name) { return nb::cast<Rows&>(writer_.attr(name)).values; }

  void statement(nb::handle one) {
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(one.ptr()));
    const size_t here = statements_.size() / STATEMENT;
    const auto add = [&](i64 kind, i64 what, i64 expr) {
      statements_.insert(statements_.end(), {kind, what, expr, static_cast<i64>(here) + 1});
    };
    if (type == on_.ptr()) {
      add(ON, set_number(attribute(one, where_name_.object)), 0);
    } else if (type == repeat_.ptr()) {
      const i64 slot = required(slot_of_(attribute(one, var_name_.object)));
      add(REPEAT, slot, number(attribute(one, count_name_.object)));
    } else if (type == when_.ptr()) {
      add(WHEN, 0, number(attribute(one, condition_name_.object)));
    } else {
      add(OP, static_cast<i64>(ops_.size() / OP_FIELDS), 0);
      const auto plain = plain_.find(type);
      if (plain == plain_.end() || !describe(one, plain->second)) describe_(one);
      return;
    }
    if (Py_EnterRecursiveCall(" in a block of statements")) throw nb::python_error();
    const Depth depth;
    read(attribute(one, body_name_.object));
    statements_[here * STATEMENT + 3] = static_cast<i64>(statements_.size() / STATEMENT);
  }

  i64 set_number(nb::object where) {
    if (const std::optional<i64> set = known(sets_, where)) return *set;
    const nb::object set = set_(where);
    sets_[where] = set;
    return required(set);
  }

  // Appends the rows of an op. Returns false, with nothing appended but views, for what Python has to describe.
  bool describe(nb::handle op, const Plain& of) {
    if (of.may_release && !attribute(op, release_name_.object).is_none()) return false;
    if (of.may_step && !attribute(op, step_name_.object).is_none()) return false;
    const std::optional<i64> lane = known(lanes_, attribute(op, lane_name_.object));
    if (!lane) return false;
    const std::optional<i64> src = of.reads ? view(attribute(op, src_name_.object)) : -1;
    const std::optional<i64> out = of.writes ? view(attribute(op, out_name_.object)) : -1;
    if (!out || !src) return false;
    const bool updates = of.may_update && PyObject_IsTrue(attribute(op, update_name_.object).ptr()) == 1;
    i64 row[OP_FIELDS] = {of.kind, *lane, *out, of.names_src ? *src : -1, -1, updates ? UPDATES : 0, -1, 0, -1, -1, 0, 0,
                          -1, -1, 1, -1, -1, -1, -1, 0, 0, 0, -1};
    if (of.has_peer) {
      row[FIRST] = number(attribute(op, peer_name_.object));
      row[SECOND] = number(attribute(op, tag_name_.object));
    }
    if (of.has_peer || (of.names_src && of.writes)) row[PRICE] = price_;
    row[FIRST_ARG] = static_cast<i64>(nb::len(args_));
    ops_.insert(ops_.end(), row, row + OP_FIELDS);
    const auto access = [&](i64 mode, i64 accessed) { accesses_.insert(accesses_.end(), {mode, accessed, -1}); };
    if (of.reads) access(READ, *src);
    if (updates || of.kind == add_kind()) access(READ, *out);
    if (of.writes) access(WRITE, *out);
    op_access_.push_back(static_cast<i64>(accesses_.size() / ACCESS));
    proof_.insert(proof_.end(), {name_number(attribute(op, name_name_.object)), -1, -1, 0, 0, -1, -1, -1});
    return true;
  }

  i64 add_kind() const { return kinds_.at("add").second; }

  i64 name_number(nb::object name) {
    if (const std::optional<i64> number = known(names_, name)) return *number;
    const auto number = static_cast<i64>(nb::len(names_));
    names_[name] = number;
    return number;
  }

  // The number of an expression.
  i64 number(nb::handle index) {
    const std::optional<i64> value = integer(index);
    if (!value) return required(number_of_(index));
    const auto [at, is_new] = numbers_.try_emplace(*value, 0);
    if (is_new) at->second = required(number_of_(index));
    return at->second;
  }

  // The number of a view; nothing where its buffer is unknown.
  std::optional<i64> view(nb::object of) {
    const auto seen = known_views_.find(of.ptr());
    if (seen != known_views_.end()) return seen->second;
    const std::optional<i64> buffer = known(buffers_, attribute(of, buffer_name_.object));
    if (!buffer) return std::nullopt;
    const nb::object rank = attribute(of, rank_name_.object);
    const i64 owner = rank.is_none() ? -1 : number(rank);
    const i64 slot = number(attribute(of, slot_name_.object));
    const nb::object selectors = attribute(of, selectors_name_.object);
    const Py_ssize_t dims = PyTuple_Size(selectors.ptr());
    if (dims < 0) throw nb::python_error();
    const auto first = static_cast<i64>(selectors_.size() / SELECTOR);
    for (Py_ssize_t dim = 0; dim < dims; ++dim) {
      const nb::handle one = PyTuple_GetItem(selectors.ptr(), dim);
      const nb::object stop = attribute(one, stop_name_.object);
      const i64 begin = number(attribute(one, start_name_.object)), end = stop.is_none() ? -1 : number(stop);
      const bool blocked = reinterpret_cast<PyObject*>(Py_TYPE(one.ptr())) != range_.ptr();
      i64 row[SELECTOR] = {blocked, begin, end, -1, -1, -1};
      if (blocked) {
        row[3] = number(attribute(one, first_name_.object));
        row[4] = number(attribute(one, block_name_.object));
        row[5] = number(attribute(one, stride_name_.object));
      }
      selectors_.insert(selectors_.end(), row, row + SELECTOR);
    }
    const auto me = static_cast<i64>(views_.size() / VIEW);
    views_.insert(views_.end(), {*buffer, slot, owner, first, static_cast<i64>(dims)});
    known_views_[of.ptr()] = me;
    return me;
  }

  nb::object writer_, lanes_, buffers_, names_, set_, describe_, slot_of_, number_of_, args_;
  i64 price_;
  std::vector<i64>&statements_, &ops_, &views_, &selectors_, &accesses_, &op_access_, &proof_;
  nb::object on_, repeat_, when_, range_;
  nb::dict sets_;
  std::unordered_map<std::string, std::pair<nb::object, i64>> kinds_;
  std::unordered_map<PyObject*, Plain> plain_;       // by type
  std::unordered_map<PyObject*, i64> known_views_;   // which the program keeps
  std::unordered_map<i64, i64> numbers_;             // of constants
  Name where_name_{"where"}, body_name_{"body"}, var_name_{"var"}, count_name_{"count"}, condition_name_{"condition"},
      lane_name_{"lane"}, name_name_{"name"}, out_name_{"out"}, src_name_{"src"}, peer_name_{"peer"}, tag_name_{"tag"},
      update_name_{"update"}, release_name_{"release"}, step_name_{"step"}, buffer_name_{"buffer"}, slot_name_{"slot"},
      rank_name_{"rank"}, selectors_name_{"selectors"}, start_name_{"start"}, stop_name_{"stop"}, first_name_{"first"},
      block_name_{"block"}, stride_name_{"stride"};
};

}  // namespace

void Rows::extend(nb::handle numbers) {
  for (nb::handle one : numbers) values.push_back(required(one));
}

void read_statements(nb::object writer, nb::handle body) { StatementReader(writer).read(body); }

}  // namespace meshweave
