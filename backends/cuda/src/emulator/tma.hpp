// Copies by TMA on a CPU. They arrive late, in any order, and until then their target holds NaN. Additions to global
// memory are as late as they may be: when they are waited for, or at the end of a block.
#pragma once
#include "emulator/mbarriers.hpp"

// What tensor_maps.py makes of an operand for the emulator, in the place of a CUtensorMap.
struct alignas(64) TensorMap {
    u64 address, lengths[4], strides[3];  // columns, rows, heads, batch; bytes from row to row, head to head, batch
    u64 rows, heads, spare[6];            // of a box
};

namespace emulator {

struct Box {
    u8* to;
    TensorMap map;
    const u8* from;  // of bytes that lie side by side; else null
    int bytes, column, row, head, batch;
    Mbarrier* full;
};

constexpr int COLUMNS = 64, ROW_BYTES = 128;  // of a box

inline std::vector<Box> boxes;

// Where the 16 bytes that belong at `offset` of shared memory lie under the swizzle by 128 bytes.
inline u32 swizzled(u32 offset) { return offset ^ (offset >> 7 & 7) << 4; }

inline void ask(const Box& box) {
    if (!box.full->published) fail("an mbarrier was not made known to copies");
    const int index = int(box.full - mbarriers);
    const Visit visit = {{OF_COPIES + index, box.full->phases + 1}, clocks[machine.current], true, true};
    for (int n = 0; n < box.bytes; n += 16)
        if (!touch(box.to + n, 16, visit)) return;
    memset(box.to, 0xff, box.bytes);
    boxes.push_back(box);
}

inline void bring(const Box& box) {
    if (box.from) {
        memcpy(box.to, box.from, box.bytes);
        return;
    }
    const TensorMap& map = box.map;
    const u32 to = u32(box.to - shared.memory);
    for (int r = 0; r < int(map.heads * map.rows); r++)
        for (int c = 0; c < COLUMNS; c++) {
            const int row = r % int(map.rows), head = r / int(map.rows);
            const i64 at[4] = {box.column + c, box.row + row, box.head + head, box.batch};
            bool there = true;
            for (int axis = 0; axis < 4; axis++) there &= at[axis] >= 0 && at[axis] < i64(map.lengths[axis]);
            i64 offset = at[0] * 2;
            for (int axis = 1; axis < 4; axis++) offset += at[axis] * i64(map.strides[axis - 1]);
            u16 value = 0;
            if (there) memcpy(&value, reinterpret_cast<const u8*>(map.address) + offset, 2);
            memcpy(shared.memory + swizzled(to + r * ROW_BYTES + c * 2), &value, 2);
        }
}

inline bool deliver() {
    if (boxes.empty()) return false;
    const int which = chance(int(boxes.size()));
    const Box box = boxes[which];
    boxes.erase(boxes.begin() + which);
    bring(box);
    box.full->bytes -= box.bytes;
    end_phase(*box.full);
    return true;
}

}  // namespace emulator

DEVICE u8* shared_panels() { return emulator::shared.memory; }
DEVICE void prefetch(const TensorMap&) {}
DEVICE bool is_elected() { return emulator::machine.current % 32 == 0; }

DEVICE void copy_box(void* to, const TensorMap& map, u64* full, int column, int row, int head, int batch) {
    using namespace emulator;
    if ((static_cast<u8*>(to) - shared.memory) % 1024) fail("a panel does not begin where the swizzle does");
    const int bytes = int(map.heads * map.rows) * ROW_BYTES;
    ask(Box{static_cast<u8*>(to), map, nullptr, bytes, column, row, head, batch, &mbarrier(full)});
}
DEVICE void copy_bytes(void* to, const void* from, int bytes, u64* full) {
    using namespace emulator;
    if (reinterpret_cast<size_t>(from) % 16 || bytes % 16) fail("a copy of bytes from an odd address, or of an odd size");
    ask(Box{static_cast<u8*>(to), {}, static_cast<const u8*>(from), bytes, 0, 0, 0, 0, &mbarrier(full)});
}
DEVICE void show_writes() {
    const int t = emulator::machine.current;
    emulator::Clock& own = emulator::clocks[t];
    own.at[emulator::SHOWN + t] = own.at[t];
    emulator::step(t);
}

namespace emulator {

struct Addition {
    float* to;
    const float* from;
    int count;
    std::vector<float> read;  // what it adds, once that was read
};

// Of a warp, one of whose lanes asks for them.
struct Additions {
    std::vector<Addition> under_way;
    int lane = -1, committed = 0;
    bool behind = false;  // those of other blocks, that a number told of

    void finish() {
        for (const Addition& each : under_way)
            for (int n = 0; n < each.count; n++) each.to[n] += each.read[n];
        under_way.clear();
    }
};

inline Additions additions[WARPS];

inline Additions& own_additions() {
    Additions& mine = additions[machine.current / WARP];
    if (mine.lane >= 0 && mine.lane != machine.current) fail("two lanes of a warp ask for additions");
    mine.lane = machine.current;
    return mine;
}

}  // namespace emulator

DEVICE void add_floats(float* to, const float* from, int count) {
    using namespace emulator;
    if (reinterpret_cast<size_t>(to) % 16 || count % 4) fail("numbers are added at an odd address, or an odd count of them");
    const int t = machine.current;
    Additions& mine = own_additions();
    if (mine.behind) return fail("additions may overtake those that a number told of");
    const Visit visit = {{OF_ADDITIONS + t / WARP, unsigned(mine.committed + 1)}, clocks[t], false, true};
    for (int n = 0; n < count; n += 4)
        if (!touch(from + n, 16, visit)) return;
    mine.under_way.push_back({to, from, count, {}});
}
DEVICE void commit_additions() { emulator::own_additions().committed++; }
DEVICE void wait_additions() {
    using namespace emulator;
    Additions& mine = own_additions();
    for (Addition& each : mine.under_way)
        if (each.read.empty()) each.read.assign(each.from, each.from + each.count);
    clocks[machine.current].at[OF_ADDITIONS + machine.current / WARP] = mine.committed;
}
DEVICE void finish_additions() {
    wait_additions();
    emulator::own_additions().finish();
}

DEVICE void leave_number(u32* at, u32 number) {
    using namespace emulator;
    if (!own_additions().under_way.empty()) return fail("a number is left before additions are done");
    if (*at + 1 != number) return fail("a number is left out of its turn");
    *at = number;
}
DEVICE void clear_number(u32* at) { *at = 0; }
DEVICE void count_block(u32* at) {
    for (const emulator::Additions& each : emulator::additions)
        if (!each.under_way.empty()) return emulator::fail("a block is counted before its additions are done");
    ++*at;
}
DEVICE u32 number_at(const u32* at) {
    emulator::own_additions().behind = true;
    return *at;
}
DEVICE void await_number(const u32* at, u32 number) {
    using namespace emulator;
    struct Wait {
        const u32* at;
        u32 number;
    } wait = {at, number};
    own_additions().behind = true;
    wait_until(
        [](const void* awaited) {
            const Wait* const wait = static_cast<const Wait*>(awaited);
            return *wait->at >= wait->number;
        },
        &wait);
    if (*at > number) fail("a number is past what is waited for");
}
DEVICE void follow_additions() { emulator::own_additions().behind = false; }
