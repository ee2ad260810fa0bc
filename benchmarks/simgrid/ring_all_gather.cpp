// Ring all-gathers over a torus in SimGrid (S4U), as fast as its public C++ interface gets.
//
//   ring_all_gather STYLE ROWS COLS PART_BYTES REPEATS BYTES_PER_S LATENCY_S
//
// Every rank takes part in one all-gather along its row and in one along its column at once, each a one-way
// ring of P - 1 steps: in step t a member sends to the next one the part that it got last, and begins step
// t + 1 once its send and its receive of step t are done. A rank begins the next of REPEATS such exchanges once
// both its rings are done. Prints one line of JSON.
//
// Network model: CM02 without its corrections (factors 1, no TCP window, no cross-traffic, no weight by
// latency), so that a message alone takes LATENCY_S + bytes / BYTES_PER_S; messages that meet would share links
// max-min fairly. Each direction of each link is a link of its own.
//
// Styles (both lead to the same simulated time on a square torus):
//   member  an actor per rank and ring, as the exchange is described above
//   rank    an actor per rank, which takes the steps of both rings together
//
// What was tried, in thousand messages per second on a 16 x 16 torus (SimGrid 3.32, 2-core AMD EPYC; medians of
// nine runs in turn where one number is given with another; a busy machine takes up to a third off all of them):
//   rank 459, member 410: as here, with network/optim:Full and a larger malloc cache
//     (GLIBC_TUNABLES=glibc.malloc.tcache_count=65535, which the Python driver sets)
//   rank 433, member 383: the same with network/optim:Lazy, SimGrid's default. Full wins because everything here
//     happens in lockstep; on 64 x 64 by 10 % as well.
// The following are of one earlier series, fastest of seven, with Lazy and malloc as it comes, in which rank had
// 374 and member 350:
//   360  member with put_async, get_async and two waits: the same within noise
//   347  member in a Torus zone in place of a full zone with one-hop routes: the same (rank: 389, but on 64 x 64
//        122 against 152 with one-hop routes, one run each)
//   330  stacks of 64 KiB instead of 16
//   368  boost contexts instead of raw ones (median 292)
//   242  no actors: Comm::sendto_init, the next message started from Activity::on_completion_cb. Half of the time
//        goes into a linear search through the comms that the main context has started.
//     4  no actors, all messages as a DAG by add_successor (10 repeats): the same search, through all messages;
//        44 with a single repeat.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include <simgrid/s4u.hpp>
#include <simgrid/version.h>
#include <xbt/log.h>

namespace sg4 = simgrid::s4u;
using Clock   = std::chrono::steady_clock;

namespace {

struct Setting {
  std::string style;
  int rows, cols;
  double part_bytes;
  int repeats;
  double bytes_per_s, latency_s;
  int num_ranks() const { return rows * cols; }
  int steps(int ring) const { return (ring == 0 ? cols : rows) - 1; }
  /// The next member of a rank's row (ring 0) or column (ring 1).
  int next(int rank, int ring) const
  {
    const int row = rank / cols, col = rank % cols;
    return ring == 0 ? row * cols + (col + 1) % cols : (row + 1) % rows * cols + col;
  }
};

Setting set;
std::vector<sg4::Host*> hosts;
std::vector<sg4::Mailbox*> boxes; ///< of rank and ring, at 2 rank + ring
std::vector<sg4::BarrierPtr> both_rings;
long messages = 0;
int payload   = 0;

void configure()
{
  xbt_log_control_set("root.thres:error");
  for (const char* option :
       {"network/model:CM02", "network/bandwidth-factor:1", "network/latency-factor:1", "network/weight-S:0",
        "network/TCP-gamma:0", "network/crosstraffic:0", "network/optim:Full", "contexts/factory:raw",
        "contexts/stack-size:16", "contexts/guard-size:0"})
    sg4::Engine::set_config(option);
}

void build_platform()
{
  auto* zone = sg4::create_full_zone("torus");
  for (int rank = 0; rank < set.num_ranks(); rank++)
    hosts.push_back(zone->create_host("h" + std::to_string(rank), 1e9)->seal());
  for (int rank = 0; rank < set.num_ranks(); rank++)
    for (int ring = 0; ring < 2; ring++) {
      if (set.steps(ring) == 0)
        continue;
      auto* link = zone->create_link("l" + std::to_string(2 * rank + ring), set.bytes_per_s)
                       ->set_latency(set.latency_s)
                       ->set_sharing_policy(sg4::Link::SharingPolicy::SHARED)
                       ->seal();
      zone->add_route(hosts[rank]->get_netpoint(), hosts[set.next(rank, ring)]->get_netpoint(), nullptr, nullptr,
                      {sg4::LinkInRoute(link)}, false);
    }
  zone->seal();
}

sg4::CommPtr send(int rank, int ring)
{
  messages++;
  return boxes[2 * set.next(rank, ring) + ring]->put_async(&payload, static_cast<uint64_t>(set.part_bytes));
}

/// Waiting on a receive that is not started yet is one call into the kernel instead of two.
void receive(int rank, int ring)
{
  int* got;
  boxes[2 * rank + ring]->get_init()->set_dst_data(reinterpret_cast<void**>(&got), sizeof(void*))->wait();
}

void member(int rank, int ring)
{
  for (int repeat = 0; repeat < set.repeats; repeat++) {
    for (int step = 0; step < set.steps(ring); step++) {
      auto sent = send(rank, ring);
      receive(rank, ring);
      sent->wait();
    }
    both_rings[rank]->wait();
  }
}

void whole_rank(int rank)
{
  int* got;
  for (int repeat = 0; repeat < set.repeats; repeat++)
    for (int step = 0; step < std::max(set.steps(0), set.steps(1)); step++) {
      if (step >= set.steps(0) || step >= set.steps(1)) {
        const int ring = step < set.steps(0) ? 0 : 1;
        auto sent      = send(rank, ring);
        receive(rank, ring);
        sent->wait();
        continue;
      }
      auto row      = send(rank, 0);
      auto received = boxes[2 * rank]->get_async<int>(&got);
      auto column   = send(rank, 1);
      receive(rank, 1);
      row->wait();
      received->wait();
      column->wait();
    }
}

void start_actors()
{
  for (int rank = 0; rank < set.num_ranks(); rank++) {
    for (int ring = 0; ring < 2; ring++)
      boxes.push_back(sg4::Mailbox::by_name("m" + std::to_string(2 * rank + ring)));
    if (set.style == "rank") {
      sg4::Actor::create("rank", hosts[rank], whole_rank, rank);
      continue;
    }
    both_rings.push_back(sg4::Barrier::create(2));
    for (int ring = 0; ring < 2; ring++)
      sg4::Actor::create("member", hosts[rank], member, rank, ring);
  }
}

double seconds(Clock::time_point from, Clock::time_point to)
{
  return std::chrono::duration<double>(to - from).count();
}

} // namespace

int main(int argc, char** argv)
{
  const auto started = Clock::now();
  sg4::Engine engine(&argc, argv);
  if (argc != 8 || (std::string(argv[1]) != "member" && std::string(argv[1]) != "rank")) {
    std::fprintf(stderr, "usage: %s member|rank ROWS COLS PART_BYTES REPEATS BYTES_PER_S LATENCY_S\n", argv[0]);
    return 2;
  }
  set = {argv[1],           std::atoi(argv[2]), std::atoi(argv[3]), std::atof(argv[4]),
         std::atoi(argv[5]), std::atof(argv[6]), std::atof(argv[7])};
  configure();
  build_platform();
  const auto built = Clock::now();
  start_actors();
  engine.run();
  const auto done = Clock::now();
  int major, minor, patch;
  sg_version_get(&major, &minor, &patch);
  std::printf("{\"simulated_s\": %.12g, \"wall_s\": %.6f, \"platform_s\": %.6f, \"messages\": %ld, "
              "\"simgrid\": \"%d.%d.%d\"}\n",
              sg4::Engine::get_clock(), seconds(built, done), seconds(started, built), messages, major, minor, patch);
  return 0;
}
