// The two kernels on the GPU, as text that the driver compiles: building them needs no CUDA.
//
// A ring is a block of the host's memory that the GPU sees, with some slots, and a few words of the GPU's own memory. Calls are
// numbered from 1 and call i has the slot i % slots. Offsets are those of Block, Flags and Shared in ffi_ring.h:
//   block: 0 stop (by the host), 8 gave_up (by the GPU), 16 lost (by the GPU); slot s at 128 (1 + s):
//          0 submitted, 8 layer (by the GPU), 64 done (by the host); then the slots' arrays
//   own:   0 the last number taken; slot s at 16 (1 + s): 0 the number that has it, 8 the last number answered in it
#pragma once

namespace cpu_experts::ffi {

inline constexpr char kKernels[] = R"ptx(
.version 6.3
.target sm_70
.address_size 64

// Bytes, by all threads; 16 at once where both ends allow it, with four loads under way, for each crosses the bus.
.func copy(.reg .b64 to, .reg .b64 from, .reg .b64 bytes, .reg .b64 thread, .reg .b64 threads)
{
    .reg .pred p;
    .reg .b64 wide, step, at, next, far;
    .reg .b32 a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3;
    .reg .b16 h;
    or.b64 at, to, from;
    and.b64 at, at, 15;
    setp.ne.u64 p, at, 0;
    and.b64 wide, bytes, -16;
    selp.b64 wide, 0, wide, p;
    shl.b64 step, threads, 4;
    shl.b64 at, thread, 4;
four:
    mad.lo.u64 far, step, 3, at;
    setp.ge.u64 p, far, wide;
    @p bra one;
    add.u64 next, from, at;
    ld.relaxed.sys.global.v4.b32 {a0, a1, a2, a3}, [next];
    add.u64 next, next, step;
    ld.relaxed.sys.global.v4.b32 {b0, b1, b2, b3}, [next];
    add.u64 next, next, step;
    ld.relaxed.sys.global.v4.b32 {c0, c1, c2, c3}, [next];
    add.u64 next, next, step;
    ld.relaxed.sys.global.v4.b32 {d0, d1, d2, d3}, [next];
    add.u64 next, to, at;
    st.global.v4.b32 [next], {a0, a1, a2, a3};
    add.u64 next, next, step;
    st.global.v4.b32 [next], {b0, b1, b2, b3};
    add.u64 next, next, step;
    st.global.v4.b32 [next], {c0, c1, c2, c3};
    add.u64 next, next, step;
    st.global.v4.b32 [next], {d0, d1, d2, d3};
    mad.lo.u64 at, step, 4, at;
    bra four;
one:
    setp.ge.u64 p, at, wide;
    @p bra narrow;
    add.u64 next, from, at;
    ld.relaxed.sys.global.v4.b32 {a0, a1, a2, a3}, [next];
    add.u64 next, to, at;
    st.global.v4.b32 [next], {a0, a1, a2, a3};
    add.u64 at, at, step;
    bra one;
narrow:
    shl.b64 step, threads, 1;
    shl.b64 at, thread, 1;
    add.u64 at, at, wide;
two:
    setp.ge.u64 p, at, bytes;
    @p bra copied;
    add.u64 next, from, at;
    ld.relaxed.sys.global.b16 h, [next];
    add.u64 next, to, at;
    st.global.b16 [next], h;
    add.u64 at, at, step;
    bra two;
copied:
    ret;
}

// NaN, of either dtype, where copy with the same thread puts its part: another block may be luckier.
.func fill(.reg .b64 to, .reg .b64 bytes, .reg .b64 thread, .reg .b64 threads)
{
    .reg .pred p;
    .reg .b64 wide, step, at, next;
    .reg .b32 a;
    .reg .b16 h;
    mov.b32 a, 0x7FC07FC0;
    mov.b16 h, 0x7FC0;
    and.b64 at, to, 15;
    setp.ne.u64 p, at, 0;
    and.b64 wide, bytes, -16;
    selp.b64 wide, 0, wide, p;
    shl.b64 step, threads, 4;
    shl.b64 at, thread, 4;
one:
    setp.ge.u64 p, at, wide;
    @p bra narrow;
    add.u64 next, to, at;
    st.global.v4.b32 [next], {a, a, a, a};
    add.u64 at, at, step;
    bra one;
narrow:
    shl.b64 step, threads, 1;
    shl.b64 at, thread, 1;
    add.u64 at, at, wide;
two:
    setp.ge.u64 p, at, bytes;
    @p bra filled;
    add.u64 next, to, at;
    st.global.b16 [next], h;
    add.u64 at, at, step;
    bra two;
filled:
    ret;
}

// Waits for the host's flag to reach a number: 1 once it has, 0 when the host stops, or after `patience` nanoseconds. Who gave up
// says so: those that come after do not wait in vain until the host has seen it.
.func (.reg .b32 there) await(.reg .b64 flag, .reg .b64 number, .reg .b64 block, .reg .b64 patience)
{
    .reg .pred p;
    .reg .b64 begin, now, stop, gave_up, found;
    mov.u64 begin, %globaltimer;
look:
    ld.relaxed.sys.global.b64 stop, [block];
    ld.relaxed.sys.global.b64 gave_up, [block+8];
    ld.acquire.sys.global.b64 found, [flag];
    mov.b32 there, 1;
    setp.ge.u64 p, found, number;
    @p bra looked;
    mov.b32 there, 0;
    or.b64 stop, stop, gave_up;
    setp.ne.u64 p, stop, 0;
    @p bra looked;
    mov.u64 now, %globaltimer;
    sub.u64 now, now, begin;
    setp.lt.u64 p, now, patience;
    @p bra look;
    st.relaxed.sys.global.b64 [block+8], number;
looked:
    ret;
}

// One block: takes a number, waits until its slot is free (it is, unless calls were never collected), hands over the arrays.
.visible .entry cpu_experts_submit(.param .u64 x_param, .param .u64 ids_param, .param .u64 weights_param,
                                   .param .u64 ticket_param, .param .u64 layer_param, .param .align 8 .b8 shared_param[96])
{
    .reg .pred p, rest;
    .reg .b32 t, there;
    .reg .b64 thread, threads, block, own, mask, number, before, slot, flags, words, seen, patience;
    .reg .b64 to, from, bytes, layer, ticket, offset;
    .shared .align 8 .b64 taken;
    ld.param.u64 block, [shared_param];
    ld.param.u64 own, [shared_param+8];
    ld.param.u64 mask, [shared_param+16];
    mov.u32 t, %tid.x;
    cvt.u64.u32 thread, t;
    setp.ne.u32 rest, t, 0;
    @rest bra known;

    atom.relaxed.gpu.global.add.u64 number, [own], 1;
    add.u64 number, number, 1;
    and.b64 slot, number, mask;
    shl.b64 words, slot, 4;
    add.u64 words, words, own;
    shl.b64 flags, slot, 7;
    add.u64 flags, flags, block;
    setp.le.u64 p, number, mask;
    @p bra free;
    sub.u64 before, number, mask;
    sub.u64 before, before, 1;
    ld.relaxed.gpu.global.b64 seen, [words+24];
    setp.ge.u64 p, seen, before;
    @p bra free;
    ld.param.u64 patience, [shared_param+88];
    add.u64 from, flags, 192;
    call (there), await, (from, before, block, patience);
    setp.ne.u32 p, there, 0;
    @p bra free;
    // The host must not wait for this number: what it finds is a call of no layer.
    mov.u64 layer, 0;
    st.relaxed.sys.global.b64 [flags+136], layer;
    st.release.sys.global.b64 [flags+128], number;
    ld.param.u64 ticket, [ticket_param];
    st.global.b64 [ticket], layer;
    st.shared.b64 [taken], layer;
    bra known;
free:
    st.relaxed.gpu.global.b64 [words+16], number;
    st.shared.b64 [taken], number;
known:
    bar.sync 0;
    ld.shared.b64 number, [taken];
    setp.eq.u64 p, number, 0;
    @p bra submitted;

    mov.u32 t, %ntid.x;
    cvt.u64.u32 threads, t;
    and.b64 slot, number, mask;
    ld.param.u64 offset, [shared_param+32];
    mul.lo.u64 to, slot, offset;
    ld.param.u64 offset, [shared_param+24];
    add.u64 to, to, offset;
    add.u64 to, to, block;
    ld.param.u64 from, [x_param];
    ld.param.u64 bytes, [shared_param+64];
    call copy, (to, from, bytes, thread, threads);
    ld.param.u64 bytes, [shared_param+72];
    ld.param.u64 from, [ids_param];
    ld.param.u64 offset, [shared_param+40];
    add.u64 offset, offset, to;
    call copy, (offset, from, bytes, thread, threads);
    ld.param.u64 from, [weights_param];
    ld.param.u64 offset, [shared_param+48];
    add.u64 offset, offset, to;
    call copy, (offset, from, bytes, thread, threads);
    bar.sync 0;
    @rest bra submitted;

    ld.param.u64 ticket, [ticket_param];
    st.global.b64 [ticket], number;
    ld.param.u64 layer, [layer_param];
    shl.b64 flags, slot, 7;
    add.u64 flags, flags, block;
    st.relaxed.sys.global.b64 [flags+136], layer;
    st.release.sys.global.b64 [flags+128], number;  // after what the other threads wrote: they have passed the barrier
submitted:
    ret;
}

// Some blocks: each waits for the host's answer and fetches its part; what cannot be had is NaN. A call that took the slot
// meanwhile may have its answer there: it said so before the host could see it, so a second look at the number tells.
.visible .entry cpu_experts_collect(.param .u64 ticket_param, .param .u64 y_param, .param .align 8 .b8 shared_param[96])
{
    .reg .pred p, rest;
    .reg .b32 t, u, there;
    .reg .b64 thread, threads, block, own, mask, number, slot, flags, words, seen, patience, to, from, bytes, offset;
    .shared .align 8 .b64 ready;
    ld.param.u64 block, [shared_param];
    ld.param.u64 own, [shared_param+8];
    ld.param.u64 mask, [shared_param+16];
    ld.param.u64 to, [ticket_param];
    ld.global.b64 number, [to];
    and.b64 slot, number, mask;
    mov.u32 t, %tid.x;
    setp.ne.u32 rest, t, 0;
    @rest bra known;

    mov.u32 there, 0;
    setp.eq.u64 p, number, 0;
    @p bra told;
    shl.b64 words, slot, 4;
    add.u64 words, words, own;
    ld.relaxed.gpu.global.b64 seen, [words+16];
    setp.eq.u64 p, seen, number;
    @p bra mine;
    st.relaxed.sys.global.b64 [block+16], number;
    bra told;
mine:
    shl.b64 flags, slot, 7;
    add.u64 flags, flags, block;
    add.u64 from, flags, 192;
    ld.param.u64 patience, [shared_param+88];
    call (there), await, (from, number, block, patience);
    setp.eq.u32 p, there, 0;
    @p bra told;
    st.relaxed.gpu.global.b64 [words+24], number;
told:
    cvt.u64.u32 seen, there;
    st.shared.b64 [ready], seen;
known:
    bar.sync 0;
    mov.u32 t, %ntid.x;
    mov.u32 u, %nctaid.x;
    mul.lo.u32 u, t, u;
    cvt.u64.u32 threads, u;
    mov.u32 u, %ctaid.x;
    mul.lo.u32 t, t, u;
    mov.u32 u, %tid.x;
    add.u32 t, t, u;
    cvt.u64.u32 thread, t;
    ld.param.u64 to, [y_param];
    ld.param.u64 bytes, [shared_param+80];
    ld.shared.b64 seen, [ready];
    setp.eq.u64 p, seen, 0;
    @p bra nothing;
    ld.param.u64 offset, [shared_param+32];
    mul.lo.u64 from, slot, offset;
    ld.param.u64 offset, [shared_param+24];
    add.u64 from, from, offset;
    ld.param.u64 offset, [shared_param+56];
    add.u64 from, from, offset;
    add.u64 from, from, block;
    call copy, (to, from, bytes, thread, threads);
    bar.sync 0;
    @rest bra checked;
    fence.acq_rel.sys;
    ld.relaxed.gpu.global.b64 seen, [words+16];
    setp.eq.u64 p, seen, number;
    @p bra checked;
    st.relaxed.sys.global.b64 [block+16], number;
    mov.u64 seen, 0;
    st.shared.b64 [ready], seen;
checked:
    bar.sync 0;
    ld.shared.b64 seen, [ready];
    setp.ne.u64 p, seen, 0;
    @p bra collected;
nothing:
    call fill, (to, bytes, thread, threads);
collected:
    ret;
}
)ptx";

}  // namespace cpu_experts::ffi
