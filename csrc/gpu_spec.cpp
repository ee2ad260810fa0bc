#include "gpu_spec.hpp"

#include <algorithm>
#include <initializer_list>
#include <string>

namespace meshweave {
namespace {

constexpr i64 LARGEST_NUMBER = i64{1} << 50;

// Reads rows of `width` numbers of a column, each within [least, LARGEST_NUMBER].
class Rows {
 public:
  Rows(const Columns& columns, const char* name, size_t width, i64 least) : width_(width) {
    const auto found = columns.find(name);
    if (found == columns.end()) throw BadInput(std::string("gpu: no column ") + name);
    values_ = &found->second;
    if (values_->size() % width) throw BadInput(std::string("gpu: ") + name + " has no whole rows");
    for (const i64 value : *values_)
      if (value < least || value > LARGEST_NUMBER) throw BadInput(std::string("gpu: ") + name + " out of range");
  }
  size_t count() const { return values_->size() / width_; }
  const i64* row(size_t at) const { return values_->data() + at * width_; }

 private:
  const Column* values_;
  size_t width_;
};

const i64* only(const Rows& rows) {
  if (rows.count() != 1) throw BadInput("gpu: one row is wanted");
  return rows.row(0);
}

void in(i64 value, i64 least, size_t end, const char* what) {
  if (value < least || value >= static_cast<i64>(end)) throw BadInput(std::string("gpu: no such ") + what);
}

void at_most(i64 most, std::initializer_list<i64> values, const char* what) {
  for (const i64 value : values)
    if (value > most) throw BadInput(std::string("gpu: too large: ") + what);
}

// Requires that rows of bytes end within LARGEST_NUMBER.
void check_address(i64 base, i64 first, i64 rows, i64 bytes, i64 stride) {
  const u128 last = static_cast<u128>(first + rows) * static_cast<u128>(stride);
  require(static_cast<u128>(base) + last + static_cast<u128>(bytes) <= static_cast<u128>(LARGEST_NUMBER),
          "gpu: an address exceeds 50 bits");
}

// Requires, besides, that they lie in few enough lines to be loaded or stored at once.
void check_area(i64 base, i64 first, i64 rows, i64 bytes, i64 stride, i64 line_bytes) {
  check_address(base, first, rows, bytes, stride);
  require(static_cast<u128>(rows) * static_cast<u128>(bytes / line_bytes + 2) <= static_cast<u128>(MOST_LINES),
          "gpu: a tile or a region has too many lines");
}

void check_spec(const GpuSpec& spec) {
  at_most(MOST_UNITS, {spec.units, spec.channels, spec.cache_banks}, "compute units, channels or banks");
  at_most(i64{1} << 24, {spec.cache_lines, spec.tracker_sets}, "cache or tracker");
  at_most(i64{1} << 30, {spec.bank_ps, spec.store_ps, spec.memory_ps}, "picoseconds of a line or a cycle");
  at_most(i64{1} << 40, {spec.hit_ps, spec.to_memory_ps, spec.from_memory_ps, spec.link_ps, spec.dma_ps}, "latencies");
  require((spec.line_bytes & (spec.line_bytes - 1)) == 0 && spec.line_bytes >= 64 && spec.line_bytes <= 4096,
          "gpu: a line has 64, 128, ... 4096 bytes");
  require(spec.cache_lines % spec.cache_ways == 0, "gpu: the cache has whole sets");
  require(spec.turn_ps >= spec.memory_ps, "gpu: latencies are at least a cycle of the memory");
}

// What a product loads at a time, and in all.
void check_tile(const Unit& unit, const Operands& x, i64 line_bytes) {
  const i64 rows = unit.i1 - unit.i0, columns = unit.j1 - unit.j0, depth = unit.k1 - unit.k0, slice = std::min(x.slice, depth);
  require(unit.i0 >= 0 && unit.j0 >= 0 && unit.k0 >= 0 && rows > 0 && columns > 0 && depth > 0, "gpu: a tile has elements");
  at_most(MOST_SIDE, {rows, columns}, "a side of a tile");
  at_most(i64{1} << 30, {unit.i1, unit.j1, unit.k1}, "a product");
  const auto check = [&](i64 base, i64 stride, bool by_k, i64 first, i64 count) {
    if (by_k)
      check_area(base + unit.k1 * x.item_bytes, first, count, slice * x.item_bytes, stride, line_bytes);
    else {
      check_address(base + first * x.item_bytes, unit.k0, depth, count * x.item_bytes, stride);
      check_area(base + first * x.item_bytes, unit.k0, slice, count * x.item_bytes, stride, line_bytes);
    }
  };
  check(x.a_base, x.a_stride, x.a_by_k != 0, unit.i0, rows);
  check(x.b_base, x.b_stride, x.b_by_k != 0, unit.j0, columns);
}

}  // namespace

MemoryInput::MemoryInput(const Columns& columns) {
  const Rows timing_rows(columns, "timing", 16, 1), controller_rows(columns, "controller", 6, 0);
  const i64* t = only(timing_rows);
  timing = {t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], t[9], t[10], t[11], t[12], t[13], t[14], t[15]};
  for (size_t field = 3; field < 16; ++field) at_most(i64{1} << 16, {t[field]}, "cycles of a delay");
  require(timing.banks <= 64 && timing.banks % timing.groups == 0, "gpu: at most 64 banks, in whole groups");
  const i64* c = only(controller_rows);
  in(c[0], 0, 3, "policy");
  controller = {static_cast<Policy>(c[0]), c[1], c[2], c[3], c[4], c[5]};
  at_most(i64{1} << 20, {controller.age_limit, controller.starvation}, "cycles of a controller");
  require(controller.queue > 0 && controller.queue <= 255, "gpu: queues have from 1 to 255 entries");
}

GpuInput::GpuInput(const Columns& columns) : MemoryInput(columns) {
  const Rows spec_rows(columns, "spec", 21, 1);
  const i64* s = only(spec_rows);
  spec = {s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9], s[10], s[11], s[12], s[13], s[14], s[15], s[16], s[17], s[18], s[19], s[20], 0};
  spec.turn_ps = std::min({spec.to_memory_ps, spec.from_memory_ps, spec.dma_ps, spec.link_ps});
  check_spec(spec);

  const Rows option_rows(columns, "options", 2, 0);
  const i64* o = only(option_rows);
  at_most(1, {o[0], o[1]}, "an option");
  options = {o[0], o[1]};

  const Rows region_rows(columns, "regions", 12, -1), operand_rows(columns, "operands", 8, 0);
  const Rows unit_rows(columns, "units", 15, -1), kernel_rows(columns, "kernels", 8, 0);
  for (size_t at = 0; at < region_rows.count(); ++at) {
    const i64* r = region_rows.row(at);
    for (size_t field = 0; field < 12; ++field) require(r[field] >= 0 || field == 5 || field == 6, "gpu: regions out of range");
    in(r[5], -1, kernel_rows.count(), "kernel of a region");
    in(r[6], -1, region_rows.count(), "region of a DMA");
    in(r[8], 0, NUM_SOURCES, "source");
    in(r[9], 0, NUM_SOURCES, "source");
    require(r[1] > 0 && r[2] > 0, "gpu: a region has rows of bytes");
    at_most(MOST_LINES, {r[4]}, "stores of a region");
    in(r[11], 0, MOST_PEERS, "peer");
    check_area(r[0], 0, r[1], r[2], r[3], spec.line_bytes);
    regions.push_back({r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7], r[8], r[9], r[10] % spec.tracker_sets, r[11]});
  }
  for (size_t at = 0; at < operand_rows.count(); ++at) {
    const i64* o = operand_rows.row(at);
    require(o[6] > 0 && o[6] <= 16 && o[7] > 0, "gpu: items have 1 to 16 bytes, slices elements");
    operands.push_back({o[0], o[1], o[2], o[3], o[4], o[5], o[6], o[7]});
  }
  for (size_t at = 0; at < kernel_rows.count(); ++at) {
    const i64* k = kernel_rows.row(at);
    const i64 before = kernels.empty() ? 0 : kernels.back().last;
    require(k[0] == before && k[1] >= k[0] && k[1] <= static_cast<i64>(unit_rows.count()), "gpu: kernels have units in turn");
    require(k[2] > 0 && k[2] <= spec.units && k[3] > 0 && k[3] <= 64, "gpu: a kernel has compute units and slots");
    at_most(i64{1} << 40, {k[4]}, "picoseconds before a kernel");
    in(k[5], 0, NUM_SOURCES, "source");
    in(k[6], 0, NUM_SOURCES, "source");
    kernels.push_back({k[0], k[1], k[2], k[3], k[4], k[5], k[6], k[7]});
  }
  for (size_t at = 0; at < unit_rows.count(); ++at) {
    const i64* u = unit_rows.row(at);
    in(u[0], 0, kernels.size(), "kernel");
    require(static_cast<i64>(at) >= kernels[static_cast<size_t>(u[0])].first && static_cast<i64>(at) < kernels[static_cast<size_t>(u[0])].last,
            "gpu: units lie by kernel");
    in(u[1], 0, regions.size(), "region");
    in(u[2], -1, regions.size(), "region");
    in(u[3], 0, 5, "store");
    in(u[13], 0, MOST_PEERS, "peer");
    require(u[2] < 0 || (u[14] >= 1 && u[14] <= static_cast<i64>(regions.size()) - u[2]), "gpu: a unit waits for regions in a row");
    in(u[4], -1, operands.size(), "operands");
    const bool is_move = u[4] < 0;
    in(u[11], is_move ? 0 : -1, regions.size(), "region");
    in(u[12], -1, regions.size(), "region");
    units.push_back({u[0], u[1], u[2], static_cast<Store>(u[3]), u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14]});
    if (!is_move) check_tile(units.back(), operands[static_cast<size_t>(u[4])], spec.line_bytes);
  }
  require(!kernels.empty() && kernels.back().last == static_cast<i64>(units.size()), "gpu: each unit is of a kernel");
}

}  // namespace meshweave
