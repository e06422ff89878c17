// The machine's NUMA nodes, and which of them holds a page of memory. By Linux's files and system calls: libnuma is one more
// library to find, for two calls.
#pragma once

#include <sched.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace cpu_experts {

constexpr int kMaxNodes = 64;

struct Node {
    int id = 0;
    cpu_set_t cores;  // those that this thread may use
};

// Cores that this thread may use, and no more than the time is worth that its control groups leave it, as containers have them:
// with more threads, all would wait for the next period. The system's files are looked for below `root`.
int usable_cores(const std::string& root = "");

// Nodes that have usable cores; only one, of all of them, where there are no more or the system does not say.
std::vector<Node> usable_nodes();

// Keeps the calling thread on a node's cores; without effect where the system refuses.
void stay_on(const Node& node);

uintptr_t page_bytes();

// Moves the pages in [from, to), whole pages of this process, to a node. It may fail, which costs speed only: the node may be
// full, or a container may forbid it (Docker does). Of a mapped file those pages are moved that are in memory and that no other
// process maps; what is read later comes to wherever it is read first.
void move_to_node(uintptr_t from, uintptr_t to, const Node& node);

// Ends what move_to_node leaves behind: a rule for this range, about pages to come. The memory is its owner's, who may use it for
// something else; and each range with a rule of its own counts as a mapping, of which a process may have 65,530, fewer than a
// large model has shares of experts.
void forget_nodes(uintptr_t from, uintptr_t to);

}  // namespace cpu_experts
