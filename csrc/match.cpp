#include "match.hpp"

#include <algorithm>
#include <map>
#include <unordered_map>

namespace meshweave {
namespace {

[[noreturn]] void mismatch(const Expanded& program, i64 rank, i64 index, const std::string& message) {
  throw ProgramFault(message, program.code.ranks[static_cast<size_t>(rank)], index);
}

constexpr u128 MESSAGES_PER_OP = 256;  // on average, of as many ops as the program may have

// The n-th collective that a rank issues in a lane over a group is the n-th one of every member.
class Collectives {
 public:
  Collectives(const Expanded& program, const Numbering& numbering, Matched& out)
      : program_(program), numbering_(numbering), out_(out) {}

  void run() {
    const Template& code = program_.code;
    std::vector<std::vector<size_t>> issued(program_.classes.size());  // collectives, by class
    for (size_t number = 0; number < issued.size(); ++number)
      for (size_t index = 0; index < program_.classes[number].ops.size(); ++index)
        if (is_collective(code.ops[static_cast<size_t>(program_.classes[number].ops[index].row)].kind))
          issued[number].push_back(index);
    const size_t num_pairs = code.lanes.size() * static_cast<size_t>(code.num_axes);
    std::vector<Turns*> of_pair(num_pairs);  // of a rank, by lane and axis
    for (i64 rank = 0; rank < code.num_ranks(); ++rank) {
      std::fill(of_pair.begin(), of_pair.end(), nullptr);
      const auto& ops = program_.of(rank).ops;
      for (const size_t index : issued[static_cast<size_t>(program_.ranks[static_cast<size_t>(rank)].of_class)]) {
        const OpRow& row = code.ops[static_cast<size_t>(ops[index].row)];
        Turns*& turns = of_pair[static_cast<size_t>(row.lane * code.num_axes + row.axis)];
        const i64 group = code.group(row.axis, rank);
        if (!turns) {  // two axes may have the same group
          turns = &channels_[static_cast<u64>(row.lane) << 32 | static_cast<u64>(group)];
          if (turns->rank != rank) turns->rank = rank, turns->next = 0;
        }
        join(*turns, group, rank, static_cast<i64>(index), row);
      }
    }
    u128 messages = 0;
    for (size_t joint = 0; joint < joined_.size(); ++joint) {
      const First& first = firsts_[joint];
      const ClassOp& op = program_.op(first.rank, first.index);
      const auto count = static_cast<u128>(code.group_size(out_.joints[joint].group));
      switch (program_.row(first.rank, first.index).kind) {
        case Kind::BROADCAST: case Kind::REDUCE: messages += (count - 1) * static_cast<u128>(op.c); break;
        case Kind::FENCE: case Kind::EXCHANGE: case Kind::PERMUTE: messages += count; break;
        default: messages += 4 * (count - 1) * count;  // twice, in both directions, at most
      }
      if (messages > MESSAGES_PER_OP * static_cast<u128>(code.max_ops))
        mismatch(program_, first.rank, first.index, "the program's collectives are made of too many messages");
      if (joined_[joint] < code.group_size(out_.joints[joint].group))
        mismatch(program_, first.rank, first.index, "some rank of its group never joins this collective");
    }
  }

 private:
  struct First {
    i64 rank, index;
  };

  // The collectives of a group in a lane, in order, and how many of them a rank has issued.
  struct Turns {
    std::vector<i64> joints;
    i64 rank = NONE;
    size_t next = 0;
  };

  void join(Turns& turns, i64 group, i64 rank, i64 index, const OpRow& mine) {
    std::vector<i64>& known = turns.joints;
    const size_t number = turns.next++;
    if (number == known.size()) {
      known.push_back(static_cast<i64>(out_.joints.size()));
      out_.joints.push_back({group, static_cast<i64>(out_.members.size()), NONE, NONE});
      out_.members.resize(out_.members.size() + static_cast<size_t>(program_.code.group_size(group)), 0);
      joined_.push_back(0);
      firsts_.push_back({rank, index});
    }
    const auto joint = static_cast<size_t>(known[number]);
    const First& first = firsts_[joint];
    const bool is_same = first.index == index && &program_.of(first.rank) == &program_.of(rank);
    if (!is_same) compare(first, rank, index, mine);
    ++joined_[joint];
    const u32 op = numbering_.of(rank, index);
    const i64 place = program_.code.place(mine.axis, rank);
    out_.members[static_cast<size_t>(out_.joints[joint].first + place)] = op;
    out_.joint_of[op] = static_cast<i32>(joint);
  }

  // Throws where an op is not what the first member of its collective issues.
  void compare(const First& first, i64 rank, i64 index, const OpRow& mine) const {
    const OpRow& theirs = program_.row(first.rank, first.index);
    const ClassOp &my = program_.op(rank, index), &their = program_.op(first.rank, first.index);
    const bool chains = mine.kind == Kind::BROADCAST || mine.kind == Kind::REDUCE;
    const bool same_way = !(chains || mine.kind == Kind::PERMUTE) || my.b == their.b;
    if (mine.kind != theirs.kind || mine.comm != theirs.comm || my.step != their.step || !same_way ||
        (chains && my.c != their.c))
      mismatch(program_, rank, index,
               "collectives in another order than on rank " +
                   std::to_string(program_.code.ranks[static_cast<size_t>(first.rank)]));
  }

  const Expanded& program_;
  const Numbering& numbering_;
  Matched& out_;
  std::unordered_map<u64, Turns> channels_;
  std::vector<i64> joined_;
  std::vector<First> firsts_;
};

struct End {
  i64 rank, index;
};

// A send is matched with a recv in order, per lane, pair of ranks and tag.
void match_messages(const Expanded& program, const Numbering& numbering, Matched& out) {
  struct Ends {
    std::vector<End> sends, recvs;
  };
  std::map<std::vector<i64>, Ends> channels;
  for (i64 rank = 0; rank < program.code.num_ranks(); ++rank) {
    const auto& ops = program.of(rank).ops;
    i64 at = program.peer_start[static_cast<size_t>(rank)];
    for (size_t index = 0; index < ops.size(); ++index) {
      const OpRow& row = program.code.ops[static_cast<size_t>(ops[index].row)];
      if (!is_message(row.kind)) continue;
      const i64 peer = program.peers[static_cast<size_t>(at)], tag = program.peers[static_cast<size_t>(at) + 1];
      at += 2;
      const bool sends = row.kind == Kind::SEND;
      Ends& ends = channels[{row.lane, sends ? rank : peer, sends ? peer : rank, tag}];
      (sends ? ends.sends : ends.recvs).push_back({rank, static_cast<i64>(index)});
    }
  }
  const auto number = [&](const End& end) { return static_cast<i64>(numbering.of(end.rank, end.index)); };
  for (const auto& [channel, ends] : channels) {
    const size_t both = std::min(ends.sends.size(), ends.recvs.size());
    if (ends.sends.size() > both) mismatch(program, ends.sends[both].rank, ends.sends[both].index, "no recv matches this send");
    if (ends.recvs.size() > both) mismatch(program, ends.recvs[both].rank, ends.recvs[both].index, "no send matches this recv");
    for (size_t at = 0; at < both; ++at) {
      const i64 sender = number(ends.sends[at]), receiver = number(ends.recvs[at]);
      if (program.op(ends.sends[at].rank, ends.sends[at].index).a != program.op(ends.recvs[at].rank, ends.recvs[at].index).a)
        mismatch(program, ends.sends[at].rank, ends.sends[at].index, "sends another size than its recv takes");
      out.joint_of[static_cast<size_t>(sender)] = out.joint_of[static_cast<size_t>(receiver)] =
          static_cast<i32>(out.joints.size());
      out.joints.push_back({NONE, NONE, sender, receiver});
    }
  }
}

}  // namespace

Matched::Matched(const Expanded& program, const Numbering& numbering)
    : joint_of(static_cast<size_t>(program.num_ops), -1) {
  Collectives(program, numbering, *this).run();
  match_messages(program, numbering, *this);
}

}  // namespace meshweave
