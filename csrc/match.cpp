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
  Collectives(const Expanded& program, Matched& out) : program_(program), out_(out) {}

  void run() {
    const Template& code = program_.code;
    for (i64 rank = 0; rank < code.num_ranks(); ++rank) {
      std::unordered_map<u64, i64> counts;
      const auto& ops = program_.of(rank).ops;
      for (size_t index = 0; index < ops.size(); ++index) {
        const OpRow& row = code.ops[static_cast<size_t>(ops[index].row)];
        if (!is_collective(row.kind)) continue;
        const i64 group = code.group(row.axis, rank);
        const u64 channel = static_cast<u64>(row.lane) << 32 | static_cast<u64>(group);
        join(channel, group, counts[channel]++, rank, static_cast<i64>(index));
      }
    }
    u128 messages = 0;
    for (size_t joint = 0; joint < joined_.size(); ++joint) {
      const First& first = firsts_[joint];
      const ClassOp& op = program_.op(first.rank, first.index);
      const auto count = static_cast<u128>(code.group_size(out_.joints[joint].group));
      switch (program_.row(first.rank, first.index).kind) {
        case Kind::BROADCAST: case Kind::REDUCE: messages += (count - 1) * static_cast<u128>(op.c); break;
        case Kind::FENCE: case Kind::PERMUTE: messages += count; break;
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

  void join(u64 channel, i64 group, i64 number, i64 rank, i64 index) {
    std::vector<i64>& known = channels_[channel];
    if (number == static_cast<i64>(known.size())) {
      known.push_back(static_cast<i64>(out_.joints.size()));
      out_.joints.push_back({group, static_cast<i64>(out_.members.size()), NONE, NONE});
      out_.members.resize(out_.members.size() + static_cast<size_t>(program_.code.group_size(group)), 0);
      joined_.push_back(0);
      firsts_.push_back({rank, index});
    }
    const auto joint = static_cast<size_t>(known[static_cast<size_t>(number)]);
    const First& first = firsts_[joint];
    const OpRow &mine = program_.row(rank, index), &theirs = program_.row(first.rank, first.index);
    const ClassOp &my = program_.op(rank, index), &their = program_.op(first.rank, first.index);
    const bool chains = mine.kind == Kind::BROADCAST || mine.kind == Kind::REDUCE;
    const bool same_way = !(chains || mine.kind == Kind::PERMUTE) || my.b == their.b;
    if (mine.kind != theirs.kind || mine.comm != theirs.comm || my.step != their.step || !same_way ||
        (chains && my.c != their.c))
      mismatch(program_, rank, index,
               "collectives in another order than on rank " +
                   std::to_string(program_.code.ranks[static_cast<size_t>(first.rank)]));
    ++joined_[joint];
    const i64 op = program_.ranks[static_cast<size_t>(rank)].base + index;
    const i64 place = program_.code.place(mine.axis, rank);
    out_.members[static_cast<size_t>(out_.joints[joint].first + place)] = static_cast<u32>(op);
    out_.joint_of[static_cast<size_t>(op)] = static_cast<i32>(joint);
  }

  const Expanded& program_;
  Matched& out_;
  std::unordered_map<u64, std::vector<i64>> channels_;
  std::vector<i64> joined_;
  std::vector<First> firsts_;
};

struct End {
  i64 rank, index;
};

// A send is matched with a recv in order, per lane, pair of ranks and tag.
void match_messages(const Expanded& program, Matched& out) {
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
  const auto number = [&](const End& end) { return program.ranks[static_cast<size_t>(end.rank)].base + end.index; };
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

Matched::Matched(const Expanded& program) : joint_of(static_cast<size_t>(program.num_ops), -1) {
  Collectives(program, *this).run();
  match_messages(program, *this);
}

}  // namespace meshweave
