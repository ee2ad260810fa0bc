"""Programs for the executors, as text, with integer inputs that make every result exact."""

import time
from pathlib import Path

import numpy as np

from meshweave.algorithms.table import ALGORITHMS
from meshweave.execute.numpy import numpy_dtype
from meshweave.ir.program.parse import parse
from meshweave.lower.one_sided import lower_one_sided
from meshweave.lower.rings import lower_rings
from meshweave.lower.tiles import write_out_tiles

GOLDEN = Path(__file__).parent.parent / "golden"

# Every collective over four ranks: even and uneven, dims that are and are not outermost in memory, members
# that are not in ascending order, a dtype that gloo does not know, memory that does not lie as the wire does.
COLLECTIVES = """
program("collectives")
q = mesh((4,), ("x",))
p = mesh((2, 2), ("row", "col"), ranks=(2, 0, 3, 1))
X = tensor((8, 12), "int64")
H = tensor((8, 12), "int16")
U = tensor((10, 7), "int32")
G0 = tensor((32, 12), "int64")
G1 = tensor((8, 48), "int64")
GH = tensor((8, 48), "int16")
GU = tensor((10, 7), "int32")
GP = tensor((16, 24), "int64")
RP = tensor((4, 24), "int64")
R0 = tensor((8, 12), "int64")
R1 = tensor((16, 24), "int64")
RU = tensor((8, 12), "int64")
RW = tensor((40, 4), "int64")
RH = tensor((8, 12), "int16")
AR = tensor((8, 12), "int64")
AH = tensor((8, 12), "int16")
BC = tensor((8, 12), "int64")
RD = tensor((8, 12), "int64")
A2 = tensor((8, 12), "int64")
A3 = tensor((40, 4), "int64")
A4 = tensor((16, 16), "int64")
PE = tensor((4, 24), "int64")
x = input(X, q[R])
h = input(H, q[R])
u = input(U, q[S(0)])
g0 = output(G0, q[R])
g1 = output(G1, q[R])
g1c = output(G1, q[R], order=(1, 0))
gh = output(GH, q[R])
gu = output(GU, q[R])
gp = output(GP, p[S(0), R])
rp = output(RP, p[S(0), S(1)])
r0 = output(R0, q[S(0)])
r1 = output(R1, q[S(1)])
ru = output(RU, q[S(1)], order=(1, 0))
rw = output(RW, q[S(0)])
rh = output(RH, q[S(1)])
ar = output(AR, q[R], order=(1, 0))
ah = output(AH, q[R])
bc = output(BC, q[R], order=(1, 0))
rd = output(RD, q[R])
a2 = output(A2, q[S(0)])
a3 = output(A3, q[S(0)])
a4 = output(A4, p[S(0), S(1)])
pe = output(PE, q[S(1)], order=(1, 0))
scaled = scratch((8, 12), "int64", on=q)
ragged = scratch((16, 24), "int64", on=q)
mine = scratch((8, 12), "int64", on=q, order=(1, 0))
ht = scratch((8, 12), "int16", on=q)
compute = lane()
net = lane()
other = lane(order="ready", width=2)
with q:
    copy(scaled, x, lane=compute)
    copy(ht, h, lane=compute)
    for i in range(q.x):
        add(scaled, x, lane=compute)
        add(ht, h, lane=compute)
    zero(ragged, lane=compute)
    copy(ragged[:8, blocked(q.x - 4, 2, 5, 0, 12)], scaled[:, blocked(q.x - 4, 2, 5)], lane=compute)
    copy(mine, scaled, lane=compute)
    all_gather(g0, scaled, over="q.x", dim=0, lane=net)
    all_gather(g1, scaled, over="q", dim=1, lane=net)
    all_gather(g1c, mine, over=(0, 1, 2, 3), dim=1, lane=net)
    all_gather(gh, ht, over="q.x", dim=1, lane=net)
    all_gather(gu, u, over="q.x", dim=0, sizes=min(3, 10 - 3 * peer), lane=net)
    reduce_scatter(r0, scaled, over="q.x", dim=0, lane=net)
    reduce_scatter(r1, ragged, over="q.x", dim=1, lane=net)
    reduce_scatter(ru, mine, over="q.x", dim=1, sizes=(3, 3, 3, 3), op="max", lane=net)
    zero(rw, lane=compute)
    reduce_scatter(rw[:q.x, :], ragged[:6, 3:7], over="q.x", dim=0, sizes=peer, lane=net)
    reduce_scatter(rh, ht, over="q.x", dim=1, lane=net)
    all_reduce(ar, scaled, over="q.x", lane=other)
    all_reduce(ah, ht, over="q.x", op="prod", lane=other)
    broadcast(bc, scaled, over="q.x", root=2, lane=other)
    zero(rd, lane=compute)
    reduce(rd, ragged[:8, :12], over="q.x", root=3, lane=other)
    broadcast(rd, rd, over="q.x", root=3, lane=other)
    all_to_all(a2, scaled[:, :3], over="q.x", split_dim=0, concat_dim=1, lane=other)
    zero(a3, lane=compute)
    all_to_all(a3[:, :q.x + 1], scaled[:q.x + 1, :10], over="q.x", split_dim=1, concat_dim=0,
            send_sizes=peer + 1, recv_sizes=peer + 1, lane=other)
    zero(pe, lane=compute)
    permute(pe[q.x % 2:q.x % 2 + 2, blocked(1, 3, 4)],
            mine[2 * q.x:2 * q.x + 2, blocked(-2, 3, 4, 0, 5)], over="q.x", shift=3, lane=net)
    fence(over="q", lane=net)
with p:
    all_gather(gp, scaled, over="p.col", dim=1, lane=net)
    reduce_scatter(rp, scaled[2:6, :], over="p.row", dim=0, lane=net)
    all_to_all(a4, scaled[:, :8], over="p.col", split_dim=1, concat_dim=1, lane=net)
    add(a4, x[:, 2:10], lane=compute)
    all_reduce(a4, a4, over="p.row", lane=net)
    broadcast(a4[:, blocked(0, 1, 2)], a4[:, blocked(1, 1, 2)], over="p.col", root=1, lane=net)
"""

# Slots that are written again while earlier readers are at work, two ring directions, column-major slots that
# a ring step sends and receives in place, products accumulated into column-major and into blocked views.
RING = """
program("ring of products")
q = mesh((RANKS,), ("x",))
A = tensor((9, RANKS4), "DTYPE")
B = tensor((RANKS4, 11), "DTYPE")
C = tensor((RANKS9, 11), "DTYPE")
D = tensor((RANKS9, 11), "DTYPE")
a = input(A, q[S(1)], order=(1, 0))
b = input(B, q[S(0)])
c = output(C, q[S(0)], order=(1, 0))
d = output(D, q[S(0)])
a_in = scratch((9, 4), "DTYPE", on=q, slots=2, order=(1, 0))
b_in = scratch((4, 11), "DTYPE", on=q, slots=2)
wide = scratch((9, 40), "DTYPE", on=q)
compute = lane()
left = lane()
right = lane()
with q:
    zero(wide, lane=compute)
    copy(a_in, a, lane=compute)
    copy(b_in, b, lane=compute)
    for s in range(RANKS):
        if s < RANKS - 1:
            permute(a_in((s + 1) % 2), a_in(s % 2), over="q.x", shift=1, lane=right)
            permute(b_in((s + 1) % 2), b_in(s % 2), over="q.x", shift=-1, lane=left)
        matmul(c, a_in(s % 2), b_in(s % 2), accumulate=s > 0, lane=compute)
        matmul(wide[:, blocked(1, 2, 4, 0, 22)], a_in(s % 2), b_in(s % 2), accumulate=1, lane=compute)
        matmul(wide[:3, :0], a_in(s % 2)[:3, :2], b_in(s % 2)[:2, :0], lane=compute)
        matmul(wide[:4, 30:34], b_in(s % 2)[:, :5], wide[:4, blocked(1, 2, 4, 0, 10)],
            transpose_b=True, accumulate=s > 0, lane=compute)
    copy(d, wide[:, blocked(1, 2, 4, 0, 22)], lane=compute)
    add(d[:4, 0:4], wide[:4, 30:34], lane=compute)
    copy(d[1:, :], d[:8, :], lane=compute)
"""

# Four ranks, two rows: half of the ranks hold nothing.
EMPTY = """
program("more ranks than rows")
q = mesh((4,), ("x",))
X = tensor((2, 3), "int64")
x = input(X, q[S(0)])
G = tensor((2, 3), "int64")
g = output(G, q[R])
Y = tensor((2, 3), "int64")
y = output(Y, q[S(0)])
Z = tensor((4, 3), "int64")
z = output(Z, q[S(0)])
P = tensor((4, 3), "int64")
p = output(P, q[S(0)])
W = tensor((12, 3), "int64")
w = output(W, q[S(0)])
compute = lane()
net = lane()
with q:
    all_gather(g, x, over="q.x", dim=0, sizes=min(1, max(0, 2 - peer)), lane=net)
    reduce_scatter(y, g, over="q.x", dim=0, sizes=min(1, max(0, 2 - peer)), lane=net)
    all_reduce(g[2:, :], g[2:, :], over="q.x", lane=net)
    reduce_scatter(g[:, 1:1], g[:, :0], over="q.x", dim=1, lane=net)
    broadcast(g[:, 3:], g[:, 3:], over="q.x", root=1, lane=net)
    broadcast(g[:0, :], x, over="q.x", root=3, lane=net)
    zero(z, lane=compute)
    reduce(z[:q.x != 1, :], x[:0, :], over="q.x", root=1, lane=net)
    zero(p, lane=compute)
    all_to_all(z[:(q.x + 1) // 2 % 2, :], y, over="q.x", split_dim=0, concat_dim=0,
               send_sizes=(peer == (q.x + 1) % 4) * min(1, max(0, 2 - q.x)),
               recv_sizes=(peer == (q.x + 3) % 4) * min(1, max(0, 2 - peer)), lane=net)
    permute(p[:(q.x + 1) // 2 % 2, :], y, over="q.x", lane=net)
    zero(w, lane=compute)
    matmul(w, w[:, :0], x[:0, :], accumulate=1, lane=compute)
    matmul(w[:2, :], g[:, :0], x[:0, :], lane=compute)
"""

# Messages both ways at once in one lane each, into column-major memory, added on arrival, and a call.
MESSAGES = """
program("messages")
q = mesh((2,), ("x",))
X = tensor((6, 10), "int32")
x = input(X, q[S(1)])
Y = tensor((6, 10), "int32")
y = output(Y, q[S(1)], order=(1, 0))
Z = tensor((6, 10), "int32")
z = output(Z, q[S(1)])
inbox = scratch((6, 5), "int32", on=q, slots=2)
compute = lane()
there = lane()
back = lane()
with q:
    copy(y, x, lane=compute)
    for s in range(5):
        if q.x == 0:
            send(x[:, s:s + 1], peer=1, tag=s % 2, lane=there)
            recv(y[:, s:s + 1], peer=1, update=True, lane=back)
        if q.x == 1:
            recv(inbox(s % 2)[:, :1], peer=0, tag=s % 2, lane=there)
            send(inbox(s % 2)[:, :1], peer=0, lane=back)
            add(y[:, s:s + 1], inbox(s % 2)[:, :1], lane=compute)
    call(fn="mix", outs=(z[:, blocked(0, 1, 2)], z[:, blocked(1, 1, 2)]),
            ins=(y[:, blocked(0, 1, 2)], x[:, :2]), args=(3 + q.x,), lane=compute)
"""


# A message is on its way into memory that a slow reader still needs: its receive must not be posted ahead.
SLOW_READER = """
program("slow reader")
q = mesh((2,), ("x",))
X = tensor((12, 3), "int64")
T = tensor((12, 3), "int64")
x = input(X, q[S(0)])
t = output(T, q[S(0)])
inbox = scratch((1, 3), "int64", on=q)
other = scratch((1, 3), "int64", on=q)
compute = lane()
net = lane()
with q:
    for s in range(6):
        permute(inbox, x[s:s + 1, :], over="q.x", shift=1, lane=net)
        call(fn="slowly", outs=(t[s:s + 1, :],), ins=(inbox,), lane=compute)
        permute(other, x[s:s + 1, :], over="q.x", shift=1, lane=net)
"""


def slowly(x):
    time.sleep(0.02)
    return x + 0


def mix(first, second, factor):
    return factor * first, second - factor


def square(y):
    return y * y


def stage(held, x, w, microbatch):
    held["x"], held["product"] = x + 0, x @ w
    return held["product"] ** 2


def stage_input_grad(held, grad, w, microbatch):
    return (2 * grad * held["product"]) @ w.T


def stage_weight_grad(held, grad, total, microbatch):
    return total + held["x"].T @ (2 * grad * held["product"])


def loss_grad(y, t):
    return y - t


def gelu(h, batch):
    return h**2 + batch


CALLS = {
    f.__name__: f for f in (slowly, mix, square, gelu, stage, stage_input_grad, stage_weight_grad, loss_grad)
}


def golden(name):
    return parse((GOLDEN / f"{name}.txt").read_text().replace("float32", "int64"))


def ring(num_ranks, dtype="int64"):
    text = (
        RING.replace("DTYPE", dtype)
        .replace("RANKS4", str(4 * num_ranks))
        .replace("RANKS9", str(9 * num_ranks))
    )
    return parse(text.replace("RANKS", str(num_ranks)))


# Both ranks send before they receive: in program order, one thread each waits for ever where sends wait for recvs.
CROSSING = """
program("crossing messages")
q = mesh((2,), ("x",))
X = tensor((4, 3), "int32")
x = input(X, q[S(0)])
Y = tensor((4, 3), "int32")
y = output(Y, q[S(0)])
inbox = scratch((2, 3), "int32", on=q)
there = lane()
back = lane()
compute = lane()
with q:
    if q.x == 0:
        send(x, peer=1, lane=there)
        recv(inbox, peer=1, lane=back)
    if q.x == 1:
        send(x, peer=0, lane=back)
        recv(inbox, peer=0, lane=there)
    copy(y, inbox, lane=compute)
"""


FUSED = ("t3_direct", "t3_all_gather", "t3_all_to_all")
"""Entries of fused products beside the golden one."""


def fused_product(name):
    """An entry of the table on four ranks, with parts of unlike sizes."""
    entry = ALGORITHMS[name]
    problem = next(entry.examples())
    return entry.program(problem, list(entry.candidates(problem))[-1])


def in_tiles(name):
    """A fused product with its products and puts written out by tiles, which are smaller than a region."""
    return write_out_tiles(golden(name) if name == "t3_ring" else fused_product(name))


IN_TILES = tuple(f"{name} in tiles" for name in ("t3_ring", *FUSED))

PROGRAMS = {
    "collectives": lambda: parse(COLLECTIVES),
    "more ranks than rows": lambda: parse(EMPTY),
    "messages": lambda: parse(MESSAGES),
    "crossing messages": lambda: parse(CROSSING),
    "slow reader": lambda: parse(SLOW_READER),
    "ring 2": lambda: ring(2, "int32"),
    "ring 4": lambda: ring(4),
    "ring 4 in halves": lambda: ring(4, "bfloat16"),
    "tapered_meshslice": lambda: golden("tapered_meshslice"),
    "tapered_meshslice as rings": lambda: lower_rings(golden("tapered_meshslice")),
    "tapered_meshslice as two-way rings": lambda: lower_rings(golden("tapered_meshslice"), num_directions=2),
    "chunked_atp": lambda: golden("chunked_atp"),
    "packetised_summa": lambda: golden("packetised_summa"),
    "one_f_one_b": lambda: golden("one_f_one_b"),
    "universal_b": lambda: lower_one_sided(golden("universal_b")),
    "universal_c": lambda: lower_one_sided(golden("universal_c")),
    "t3_ring": lambda: lower_one_sided(golden("t3_ring")),
    **{name: lambda name=name: lower_one_sided(fused_product(name)) for name in FUSED},
    **{
        name: lambda name=name: lower_one_sided(in_tiles(name.removesuffix(" in tiles"))) for name in IN_TILES
    },
    "pipeline of includes": lambda: golden("include/pipeline"),
    "includes in two orientations": lambda: golden("include/feed_forward"),
}


def inputs_for(program, seed=0):
    """Small integers, so that sums of products are exact in every dtype."""
    chooser = np.random.default_rng(seed)
    tensors = sorted({buffer.tensor for buffer in program.buffers if buffer.kind == "input"})
    return {
        name: chooser.integers(-2, 3, program.tensor_of[name].shape).astype(
            numpy_dtype(program.tensor_of[name].dtype)
        )
        for name in tensors
    }
