#include "skeleton.hpp"

#include <algorithm>
#include <compare>

namespace meshweave {
namespace {

constexpr i64 MOST = i64{1} << 40;      // of times and packets
constexpr i64 MOST_RANKS = i64{1} << 24;
constexpr i64 MOST_PS = i64{1} << 62;  // and of turns
constexpr i64 MOST_TIMES = i64{1} << 27;  // that are kept at once
constexpr i64 MOST_STEPS = i64{1} << 33;  // of tasks on ranks, some seconds
constexpr i64 MOST_LEVELS = 16;           // of parts in parts
constexpr auto TOO_MANY_STEPS = "a program of so many steps takes too long to estimate";

using Times = std::vector<i64>;  // by rank of the grid

enum class How : i64 { LOCAL, MEET, EXCHANGE, BROADCAST, REDUCE, PART };

struct Wait {
  i64 task, back;
};

struct Item {
  How how{};
  i64 number = 0, lane = 0, axis = -1, ps = 0, times = 1, launch_ps = 0, packets = 1, part = 0;
  bool is_buffered = false;  // a chain whose senders end when the last packet begins to flow
  i64 burst_ps = 0;          // what a link makes up for, once it was idle
  std::vector<i64> roots;
  std::vector<Wait> waits;
  std::vector<std::pair<i64, std::vector<Wait>>> lane_waits;  // of a part
};

struct Phase {
  i64 turns;
  std::vector<Item> items;
  i64 reach = 0;           // turns that waits reach back
  bool is_jumped = false;  // whether turns are left out once they are steady
};

// An end, and what it grows by from turn to turn.
struct Linear {
  i64 end = 0, rate = 0;
  auto operator<=>(const Linear&) const = default;
};

struct Part {
  i64 num_tasks, depth;  // depth: turns of which the ends are kept
  i64 most_ps = 0;       // more than all of its tasks one after the other
  i64 num_steps = 0, num_levels = 1;
  std::vector<i64> lanes;
  std::vector<Phase> phases;
};

class Reader {
 public:
  explicit Reader(const std::vector<i64>& code) : code_(code) {}
  bool done() const { return at_ == code_.size(); }
  i64 next(i64 low, i64 high) {
    require(at_ < code_.size(), "skeleton: the code ends too soon");
    const i64 value = code_[at_++];
    require(value >= low && value <= high, "skeleton: a number out of range");
    return value;
  }
  i64 count() { return next(0, static_cast<i64>(code_.size() - at_)); }  // of what takes a number each at least
  i64 index(i64 count) { return next(0, count - 1); }

 private:
  const std::vector<i64>& code_;
  size_t at_ = 0;
};

class Follower {
 public:
  explicit Follower(const std::vector<i64>& code) {
    Reader reader(code);
    for (i64 left = reader.count(); left > 0; --left) {
      extents_.push_back(reader.next(1, MOST_RANKS));
      num_ranks_ = checked_mul(num_ranks_, extents_.back());
      require(num_ranks_ <= MOST_RANKS, "skeleton: the grid is too large");
    }
    strides_.assign(extents_.size(), 1);
    for (size_t axis = extents_.size(); axis-- > 1;) strides_[axis - 1] = strides_[axis] * extents_[axis];
    const i64 num_lanes = reader.count();
    require(checked_mul(num_lanes, num_ranks_) <= MOST_TIMES, "skeleton: too many lanes");
    lanes_.assign(static_cast<size_t>(num_lanes), zeros());
    links_.assign(extents_.size(), {});
    for (i64 left = reader.count(); left > 0; --left) parts_.push_back(read_part(reader));
    require(reader.done() && !parts_.empty(), "skeleton: the code is not of one skeleton");
  }

  i64 total_ps() {
    run(parts_.back());
    i64 last = 0;
    for (const Times& lane : lanes_) last = std::max(last, *std::max_element(lane.begin(), lane.end()));
    return last;
  }

 private:
  Times zeros() const { return Times(static_cast<size_t>(num_ranks_), 0); }

  // --- reading ----------------------------------------------------------------------------------------------

  std::vector<Wait> read_waits(Reader& reader, const Part& of) {
    std::vector<Wait> out;
    for (i64 left = reader.count(); left > 0; --left) {
      const i64 task = reader.index(of.num_tasks);
      out.push_back({task, reader.index(of.depth)});
    }
    return out;
  }

  Part read_part(Reader& reader) {
    Part out;
    out.num_tasks = reader.next(0, MOST_RANKS);
    out.depth = reader.next(1, MOST_RANKS);
    require(checked_mul(checked_mul(out.num_tasks, out.depth), num_ranks_) <= MOST_TIMES, "skeleton: too many tasks");
    for (i64 left = reader.count(); left > 0; --left) out.lanes.push_back(lane(reader));
    for (i64 left = reader.count(); left > 0; --left) {
      Phase phase{reader.next(0, MOST_PS), {}};
      i64 phase_steps = 0;
      phase.is_jumped = num_ranks_ == 1;
      for (i64 items = reader.count(); items > 0; --items) {
        phase.items.push_back(read_item(reader, out, phase.turns));
        const Item& item = phase.items.back();
        const bool is_one = item.how == How::LOCAL || item.how == How::MEET;
        i64 steps = checked_mul(num_ranks_, is_one ? 1 : item.times);
        if (item.how == How::PART) {
          const Part& inner = parts_[static_cast<size_t>(item.part)];
          steps = inner.num_steps;
          out.num_levels = std::max(out.num_levels, inner.num_levels + 1);
        }
        phase.is_jumped = phase.is_jumped && (item.how == How::LOCAL || item.how == How::MEET);
        for (const Wait& one : item.waits) phase.reach = std::max(phase.reach, one.back);
        phase_steps = checked_add(phase_steps, steps);
        out.most_ps = checked_add(out.most_ps, checked_mul(phase.turns, most_ps(item)));
      }
      if (!phase.is_jumped)
        out.num_steps = checked_add(out.num_steps, checked_mul(phase.turns, checked_add(phase_steps, out.num_tasks + 1)));
      out.phases.push_back(std::move(phase));
    }
    require(out.num_levels <= MOST_LEVELS, "skeleton: parts in parts in parts");
    if (out.num_steps > MOST_STEPS) throw ProgramFault(TOO_MANY_STEPS);
    return out;
  }

  // An upper bound, so that no sum of a run exceeds 64 bits once this one does not.
  i64 most_ps(const Item& item) const {
    if (item.how == How::PART) return parts_[static_cast<size_t>(item.part)].most_ps;
    if (item.how != How::BROADCAST && item.how != How::REDUCE) return checked_mul(item.times, item.ps);
    const i64 steps = checked_add(item.packets, extents_[static_cast<size_t>(item.axis)]);
    return checked_mul(item.times, checked_add(item.launch_ps, checked_mul(steps, item.ps)));
  }

  i64 lane(Reader& reader) { return reader.index(static_cast<i64>(lanes_.size())); }
  i64 axis(Reader& reader) { return reader.index(static_cast<i64>(extents_.size())); }

  Item read_item(Reader& reader, const Part& of, i64 turns) {
    Item out;
    out.how = static_cast<How>(reader.next(0, static_cast<i64>(How::PART)));
    out.number = reader.index(of.num_tasks);
    if (out.how == How::PART) {
      out.part = reader.index(static_cast<i64>(parts_.size()));
      for (i64 left = reader.count(); left > 0; --left) {
        const i64 number = lane(reader);
        out.lane_waits.emplace_back(number, read_waits(reader, of));
      }
      return out;
    }
    out.lane = lane(reader);
    out.ps = reader.next(0, MOST_PS);
    out.times = reader.next(0, MOST);
    switch (out.how) {
      case How::MEET: out.axis = reader.next(-1, static_cast<i64>(extents_.size()) - 1); break;
      case How::EXCHANGE: out.axis = axis(reader); break;
      case How::BROADCAST:
      case How::REDUCE: {
        out.axis = axis(reader);
        out.launch_ps = reader.next(0, MOST_PS);
        out.packets = reader.next(1, MOST);
        out.is_buffered = reader.next(0, 1) == 1;
        out.burst_ps = reader.next(0, MOST_PS);
        const i64 roots = reader.count();
        require(roots == checked_mul(turns, out.times), "skeleton: a chain has a root for each time that it runs");
        for (i64 left = roots; left > 0; --left) out.roots.push_back(reader.index(extents_[static_cast<size_t>(out.axis)]));
        break;
      }
      default: break;
    }
    out.waits = read_waits(reader, of);
    return out;
  }

  // --- following --------------------------------------------------------------------------------------------

  void run(const Part& part) {
    const auto num_tasks = static_cast<size_t>(part.num_tasks);
    const i64 kept = part.depth + (num_ranks_ == 1 ? 1 : 0);  // turns: of one rank one more, to see what a turn shifts by
    std::vector<Times> ends(num_tasks * static_cast<size_t>(kept));  // empty where a task did not run
    i64 turn = 0;
    const auto slot = [&](i64 task, i64 back) -> Times& {
      return ends[static_cast<size_t>(floor_mod(turn - back, kept)) * num_tasks + static_cast<size_t>(task)];
    };
    const auto wait = [&](Times& start, const std::vector<Wait>& waits) {
      for (const Wait& one : waits) {
        const Times& end = slot(one.task, one.back);
        for (size_t rank = 0; rank < end.size(); ++rank) start[rank] = std::max(start[rank], end[rank]);
      }
    };
    for (const Phase& phase : part.phases) {
      for (i64 of_phase = 0; of_phase < phase.turns; ++of_phase, ++turn) {
        if (kept > 1)  // tasks of another phase that this turn does not have
          for (size_t task = 0; task < num_tasks; ++task) slot(static_cast<i64>(task), 0).clear();
        for (const Item& item : phase.items) {
          if (item.how == How::PART) {
            const Part& inner = parts_[static_cast<size_t>(item.part)];
            for (const auto& [number, waits] : item.lane_waits) wait(lanes_[static_cast<size_t>(number)], waits);
            run(inner);
            Times& end = slot(item.number, 0);
            end = zeros();
            for (const i64 number : inner.lanes)
              for (size_t rank = 0; rank < end.size(); ++rank)
                end[rank] = std::max(end[rank], lanes_[static_cast<size_t>(number)][rank]);
            continue;
          }
          Times& times = lanes_[static_cast<size_t>(item.lane)];
          wait(times, item.waits);
          advance(item, times, of_phase);
          slot(item.number, 0) = times;
        }
        if (!phase.is_jumped) continue;
        num_followed_ += static_cast<i64>(num_tasks + phase.items.size());
        if (num_followed_ > MOST_STEPS) throw ProgramFault(TOO_MANY_STEPS);
        const i64 done = of_phase + 1, left = phase.turns - done;
        if (left == 0 || done <= phase.reach || done < 2 || (done & (done - 1)) != 0 || !is_steady(phase, num_tasks, slot)) continue;
        turn += left;  // the last turn, and those before it that others may wait for
        for (i64 back = std::min(left, part.depth) - 1; back >= 0; --back) {
          for (size_t task = 0; task < num_tasks; ++task) slot(static_cast<i64>(task), back).clear();
          for (const Item& item : phase.items) {
            const Linear& at = rates_[static_cast<size_t>(item.number)];
            slot(item.number, back) = {at.end + (left - back) * at.rate};
          }
        }
        for (const Item& item : phase.items) lanes_[static_cast<size_t>(item.lane)] = slot(item.number, 0);
        ++turn;
        break;
      }
    }
  }

  // Whether all later turns of a phase are linear: the end of each task shifts by one amount a turn, set in `rates_`.
  // Lanes that do not block each other, such as a ring that is faster than the products, shift by different amounts.
  // Two conditions are enough. The ends that the next turn depends on were linear so far. And in the next turn the
  // input that each task waits for last is also the one that shifts most, so that it is the last one in all turns.
  template <class Slot>
  bool is_steady(const Phase& phase, size_t num_tasks, const Slot& slot) {
    const auto grown = [&](i64 task, i64 ago) {  // what the end of a task grew by, so many turns ago
      const Times &newer = slot(task, ago - 1), &older = slot(task, ago);
      return newer.empty() || older.empty() ? i64{-1} : newer[0] - older[0];
    };
    rates_.assign(num_tasks, {});
    next_.assign(num_tasks, {});
    lane_ends_.assign(lanes_.size(), {});
    for (const Item& item : phase.items) {
      Linear& own = rates_[static_cast<size_t>(item.number)];
      own = {slot(item.number, 0)[0], grown(item.number, 1)};
      if (own.rate < 0) return false;
      lane_ends_[static_cast<size_t>(item.lane)] = own;
    }
    for (const Item& item : phase.items) {
      const Linear own = rates_[static_cast<size_t>(item.number)];
      Linear begin = lane_ends_[static_cast<size_t>(item.lane)];
      i64 most = begin.rate;
      for (const Wait& one : item.waits) {
        const auto task = static_cast<size_t>(one.task);
        Linear input = next_[task];
        if (one.back > 0) {
          if (slot(one.task, 0).empty()) continue;
          for (i64 ago = 1; ago <= one.back; ++ago)
            if (grown(one.task, ago) != rates_[task].rate) return false;
          input = {slot(one.task, one.back - 1)[0], rates_[task].rate};
        }
        most = std::max(most, input.rate);
        begin = std::max(begin, input);
      }
      const Linear end{begin.end + item.ps * item.times, begin.rate};
      if (begin.rate < most || begin.rate != own.rate || end.end != own.end + own.rate) return false;
      next_[static_cast<size_t>(item.number)] = lane_ends_[static_cast<size_t>(item.lane)] = end;
    }
    return true;
  }

  // Turns the begin of an item on each rank into its end.
  void advance(const Item& item, Times& times, i64 turn) {
    switch (item.how) {
      case How::LOCAL: add(times, item.ps * item.times); break;
      case How::MEET:
        if (item.axis < 0) {
          times.assign(times.size(), *std::max_element(times.begin(), times.end()));
        } else {
          each_line(item.axis, times, [&] { line_.assign(line_.size(), *std::max_element(line_.begin(), line_.end())); });
        }
        add(times, item.ps * item.times);
        break;
      case How::EXCHANGE:
        for (i64 left = item.times; left > 0; --left) {
          each_line(item.axis, times, [&] { meet_neighbours(); });
          add(times, item.ps);
        }
        break;
      default:
        for (i64 one = 0; one < item.times; ++one) {
          const i64 root = item.roots[static_cast<size_t>(turn * item.times + one)];
          chain(item, item.how == How::REDUCE ? root + 1 : root, times);
        }
    }
  }

  static void add(Times& times, i64 ps) {
    for (i64& time : times) time += ps;
  }

  // A message to each neighbour, and one from it.
  void meet_neighbours() {
    const size_t count = line_.size();
    other_.resize(count);
    for (size_t at = 0; at < count; ++at)
      other_[at] = std::max({line_[at], line_[at + 1 == count ? 0 : at + 1], line_[at == 0 ? count - 1 : at - 1]});
    line_.swap(other_);
  }

  // Packets pass the hops of each ring along an axis, from place `first` on. Hop h ends one packet after the hop
  // before it, and at least as many packets as there are after both its members have begun.
  void chain(const Item& item, i64 first, Times& times) {
    const auto count = static_cast<size_t>(extents_[static_cast<size_t>(item.axis)]);
    const auto stride = static_cast<size_t>(strides_[static_cast<size_t>(item.axis)]);
    const i64 all_packets = item.packets * item.ps;
    if (count == 1) {
      add(times, item.launch_ps);
      return;
    }
    line_.resize(stride);
    i64* const end = line_.data();  // of the last hop, on each of the rings that lie side by side
    if (item.is_buffered) {
      buffered_chain(item, static_cast<size_t>(first) % count, times);
      return;
    }
    for (size_t outer = 0; outer < times.size(); outer += count * stride) {
      i64* const ring = times.data() + outer;
      size_t place = static_cast<size_t>(first) % count;
      for (size_t hop = 0; hop + 1 < count; ++hop) {
        const size_t next = place + 1 == count ? 0 : place + 1;
        i64* const sender = ring + place * stride;
        const i64* const receiver = ring + next * stride;
        if (hop == 0) {
          for (size_t at = 0; at < stride; ++at)
            sender[at] = end[at] = std::max(sender[at], receiver[at]) + item.launch_ps + all_packets;
        } else {
          for (size_t at = 0; at < stride; ++at)
            sender[at] = end[at] = std::max(end[at] + item.ps, std::max(sender[at], receiver[at]) + all_packets);
        }
        place = next;
      }
      std::copy(end, end + stride, ring + place * stride);
    }
  }

  // The same where a send buffer takes the packets: a sender ends when its last packet begins to flow, so that the next
  // chain may begin while a link still carries this one, and waits for the link. A link that was idle makes up for it.
  void buffered_chain(const Item& item, size_t begin, Times& times) {
    const auto count = static_cast<size_t>(extents_[static_cast<size_t>(item.axis)]);
    const auto stride = static_cast<size_t>(strides_[static_cast<size_t>(item.axis)]);
    const i64 all_packets = item.packets * item.ps;
    Times& links = links_[static_cast<size_t>(item.axis)];
    if (links.empty()) links.assign(times.size(), -MOST_PS);
    other_.resize(stride);
    i64 *const end = line_.data(), *const first = other_.data();  // of the last and of the first packet over a hop
    for (size_t outer = 0; outer < times.size(); outer += count * stride) {
      i64* const ring = times.data() + outer;
      size_t place = begin;
      for (size_t hop = 0; hop + 1 < count; ++hop) {
        const size_t next = place + 1 == count ? 0 : place + 1;
        i64* const sender = ring + place * stride;
        const i64* const receiver = ring + next * stride;
        i64* const link = links.data() + outer + place * stride;
        for (size_t at = 0; at < stride; ++at) {
          i64 arrival = std::max(sender[at], receiver[at]) + (hop == 0 ? item.launch_ps : 0);
          if (hop > 0) arrival = std::max(arrival, first[at]);
          const i64 flow = std::max(arrival - item.burst_ps, link[at]);
          first[at] = std::max(flow + item.ps, arrival);
          link[at] = flow + all_packets;
          const i64 before = hop == 0 ? 0 : end[at];
          end[at] = std::max({link[at], first[at], before});
          sender[at] = std::max(sender[at], end[at] - item.ps);
        }
        place = next;
      }
      std::copy(end, end + stride, ring + place * stride);
    }
  }

  template <class Change>
  void each_line(i64 axis, Times& times, Change change) {
    const auto extent = static_cast<size_t>(extents_[static_cast<size_t>(axis)]);
    const auto stride = static_cast<size_t>(strides_[static_cast<size_t>(axis)]);
    line_.resize(extent);
    for (size_t outer = 0; outer < times.size(); outer += extent * stride)
      for (size_t inner = outer; inner < outer + stride; ++inner) {
        for (size_t place = 0; place < extent; ++place) line_[place] = times[inner + place * stride];
        change();
        for (size_t place = 0; place < extent; ++place) times[inner + place * stride] = line_[place];
      }
  }

  std::vector<i64> extents_, strides_;
  i64 num_ranks_ = 1;
  std::vector<Times> lanes_;
  std::vector<Part> parts_;
  std::vector<Times> links_;  // by axis: when the link from each rank to the next one is free; empty without such chains
  Times line_, other_;
  i64 num_followed_ = 0;  // steps of phases that may be jumped over
  std::vector<Linear> rates_, next_, lane_ends_;
};

}  // namespace

i64 skeleton_ps(const std::vector<i64>& code) { return Follower(code).total_ps(); }

}  // namespace meshweave
