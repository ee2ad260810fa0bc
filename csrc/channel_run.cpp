// One channel by itself, for those who compare it with closed forms and with the reference.
#include <algorithm>

#include "gpu.hpp"
#include "gpu_spec.hpp"

namespace meshweave {
namespace {

constexpr i64 MOST_COMMANDS = 4096;
constexpr i64 CYCLES = i64{1} << 20;  // from one look at whether all is done to the next

}  // namespace

Column run_channel(const Columns& columns) {
  const MemoryInput input(columns);
  const auto found = columns.find("requests");
  require(found != columns.end() && found->second.size() % 7 == 0, "gpu: no whole requests");
  Channel channel(input.timing, input.controller);
  i64 end = 1, last[2] = {0, 0};
  for (size_t at = 0; at < found->second.size(); at += 7) {
    const i64* r = &found->second[at];
    for (size_t field = 0; field < 7; ++field) require(r[field] >= 0 && r[field] < (i64{1} << 30), "gpu: requests out of range");
    require(r[4] <= MOST_COMMANDS, "gpu: too many column commands of a request");
    require(r[0] < 2 && r[2] < input.timing.banks && r[4] > 0 && r[5] < 3, "gpu: no such stream, bank or access");
    require(r[1] >= last[r[0]], "gpu: arrivals of a stream do not decrease");
    last[r[0]] = r[1];
    end = std::max(end, r[1] + 1);
    channel.push(r[0], {r[1], static_cast<u32>(r[2]), static_cast<u32>(r[3]), static_cast<u32>(r[4]),
                        static_cast<MemoryAccess>(r[5]), 0, static_cast<u64>(r[6])});
  }
  std::vector<MemoryEvent> events;
  for (; !channel.empty(); end += CYCLES) {
    if (end > MOST_PS) throw ProgramFault("the channel never gets empty");
    channel.run(end, events);
  }
  Column out;
  for (const MemoryEvent& event : events) {
    out.push_back(event.cycle);
    out.push_back(event.is_done);
    out.push_back(static_cast<i64>(event.tag));
  }
  return out;
}

}  // namespace meshweave
