// The only file that knows Python. Columns come in as a dict of one-dimensional int64 arrays; numbers by op go out
// as arrays. A program that cannot run raises ProgramFault (message, rank, op), bad columns raise ValueError.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include "engine.hpp"
#include "gpu.hpp"
#include "prove.hpp"
#include "reader.hpp"
#include "skeleton.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using meshweave::i64;
using Array = nb::ndarray<const i64, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

meshweave::Columns columns_of(const nb::dict& given) {
  meshweave::Columns out;
  for (const auto& [name, values] : given) {
    Array array;
    if (!nb::try_cast(values, array, false))
      throw meshweave::BadInput("columns: " + nb::cast<std::string>(nb::str(name)) + " is no array of int64");
    out.emplace(nb::cast<std::string>(nb::str(name)), meshweave::Column(array.data(), array.data() + array.size()));
  }
  return out;
}

template <class T>
nb::object array_of(std::vector<T>&& values) {
  auto* owned = new std::vector<T>(std::move(values));
  nb::capsule owner(owned, [](void* data) noexcept { delete static_cast<std::vector<T>*>(data); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(owned->data(), {owned->size()}, owner));
}

void check_signals(i64) {
  nb::gil_scoped_acquire held;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

// Both readings of one template: expanded once, simulated on as many machines as wanted.
class Core {
 public:
  explicit Core(const nb::dict& columns) : program_(columns_of(columns)) {}

  i64 num_ops() const { return program_.num_ops; }
  i64 num_classes() const { return static_cast<i64>(program_.classes.size()); }

  nb::object starts() const {
    std::vector<i64> out;
    for (const meshweave::Rank& rank : program_.ranks) out.push_back(rank.base);
    out.push_back(program_.num_ops);
    return array_of(std::move(out));
  }

  nb::object rows() const {
    std::vector<i64> out;
    out.reserve(static_cast<size_t>(program_.num_ops));
    for (i64 rank = 0; rank < program_.code.num_ranks(); ++rank)
      for (const meshweave::ClassOp& op : program_.of(rank).ops) out.push_back(op.row);
    return array_of(std::move(out));
  }

  // (op, op that it waits for on its own rank) of one rank, for those who compare.
  nb::object edges(i64 rank) const {
    if (rank < 0 || rank >= program_.code.num_ranks()) throw meshweave::BadInput("edges: no such rank");
    const meshweave::Class& of = program_.of(rank);
    std::vector<i64> out;
    for (size_t op = 0; op < of.ops.size(); ++op)
      for (i64 at = of.before_start[op]; at < of.before_start[op + 1]; ++at) {
        out.push_back(static_cast<i64>(op));
        out.push_back(of.before[static_cast<size_t>(at)]);
      }
    return array_of(std::move(out));
  }

  nb::object works() const { return array_of(std::move(meshweave::Works(program_).rows)); }

  nb::object collectives() const { return array_of(meshweave::sized_keys(program_)); }

  nb::object routes(const Array& num_directions, const Array& rails) const {
    const meshweave::Column given(num_directions.data(), num_directions.data() + num_directions.size());
    const meshweave::Column several(rails.data(), rails.data() + rails.size());
    std::vector<i64> out;
    for (const meshweave::Route& route : meshweave::routes(program_, given, several)) {
      out.push_back(route.source);
      out.push_back(route.target);
      out.push_back(route.number);
    }
    return array_of(std::move(out));
  }

  nb::dict run(const nb::dict& machine_columns) const {
    const meshweave::Machine machine(columns_of(machine_columns), program_);
    meshweave::Result result;
    {
      nb::gil_scoped_release released;
      result = meshweave::simulate(program_, machine, check_signals);
    }
    std::vector<i64> parts;
    for (const meshweave::Parts& of : result.parts)
      parts.insert(parts.end(), {of.compute, of.copy, of.launch, of.sync, of.transfer, of.wait});
    nb::dict out;
    out["issued_ps"] = array_of(std::move(result.issued_ps));
    out["ended_ps"] = array_of(std::move(result.ended_ps));
    out["cause"] = array_of(std::move(result.cause));
    out["last_partner"] = array_of(std::move(result.last_partner));
    out["parts_ps"] = array_of(std::move(parts));
    out["carried"] = array_of(std::move(result.carried));
    out["num_events"] = result.num_events;
    return out;
  }

 private:
  const meshweave::Expanded program_;
};

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "The simulator core, and the proof of programs; callers are `simulate.engine`, the GPU of the studies, "
      "`estimate.chains` and `ir.analysis.native_proof`.";
  static PyObject* const fault = PyErr_NewException("meshweave._core.ProgramFault", PyExc_Exception, nullptr);
  m.attr("ProgramFault") = nb::borrow(fault);
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const meshweave::ProgramFault& error) {
      PyErr_SetObject(fault, nb::make_tuple(error.what(), error.rank, error.op).ptr());
    } catch (const meshweave::BadInput& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
    }
  });
  m.def(
      "prove",
      [](const nb::dict& given) {
        const meshweave::Columns columns = columns_of(given);
        nb::gil_scoped_release released;
        return static_cast<i64>(meshweave::prove(columns));
      },
      "columns"_a);
  m.def(
      "run_channel",
      [](const nb::dict& given) {
        const meshweave::Columns columns = columns_of(given);
        meshweave::Column events;
        {
          nb::gil_scoped_release released;
          events = meshweave::run_channel(columns);
        }
        return array_of(std::move(events));
      },
      "columns"_a);
  m.def(
      "run_gpus",
      [](const nb::dict& given, i64 num_devices, i64 max_steps) {
        const meshweave::Columns columns = columns_of(given);
        meshweave::GpuResult result;
        {
          nb::gil_scoped_release released;
          result = meshweave::run_gpus(columns, num_devices, max_steps, check_signals);
        }
        nb::dict out;
        out["kernel_starts"] = array_of(std::move(result.kernel_starts));
        out["kernel_ends"] = array_of(std::move(result.kernel_ends));
        out["traffic"] = array_of(std::move(result.traffic));
        out["bins"] = array_of(std::move(result.bins));
        out["occupancy"] = array_of(std::move(result.occupancy));
        out["waits"] = array_of(std::move(result.waits));
        out["counters"] = array_of(std::move(result.counters));
        return out;
      },
      "columns"_a, "num_devices"_a, "max_steps"_a = i64{1} << 40);
  nb::class_<meshweave::Rows>(m, "Rows")
      .def(nb::init<>())
      .def("__len__", [](const meshweave::Rows& rows) { return rows.values.size(); })
      .def("extend", &meshweave::Rows::extend, "numbers"_a)
      .def("column", [](const meshweave::Rows& rows) { return array_of(std::vector<i64>(rows.values)); });
  m.def("read_statements", &meshweave::read_statements, "writer"_a, "body"_a);
  m.def(
      "skeleton_ps",
      [](const Array& given) {
        const meshweave::Column code(given.data(), given.data() + given.size());
        nb::gil_scoped_release released;
        return meshweave::skeleton_ps(code);
      },
      "code"_a);
  nb::class_<Core>(m, "Core")
      .def(nb::init<const nb::dict&>(), "columns"_a)
      .def_prop_ro("num_ops", &Core::num_ops)
      .def_prop_ro("num_classes", &Core::num_classes)
      .def("starts", &Core::starts)
      .def("rows", &Core::rows)
      .def("edges", &Core::edges, "rank"_a)
      .def("works", &Core::works)
      .def("collectives", &Core::collectives)
      .def("routes", &Core::routes, "num_directions"_a, "rails"_a)
      .def("run", &Core::run, "machine"_a);
}
