#include "topology.h"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <thread>

namespace cpu_experts {
namespace {

constexpr int kMaxIds = 1024;  // of nodes: what Linux can be built for at most
constexpr long kMaxNumber = 1 << 16;  // in a list: past every node and core there is
constexpr long long kNoLimit = 1 << 30;

// A file's one line, without its end.
bool read_line(const char* path, char* text, int size) {
    FILE* file = std::fopen(path, "re");
    if (!file) return false;
    size_t length = std::fread(text, 1, size_t(size) - 1, file);
    std::fclose(file);
    if (length == 0 || text[length - 1] != '\n') return false;
    text[length - 1] = 0;
    return std::strlen(text) == length - 1;
}

// Calls take(i) for all of a list of the system's, like "0-3,8" or ""; false where the file is none.
template <class Take>
bool read_list(const char* path, Take take) {
    char text[8192], *at = text;
    if (!read_line(path, text, sizeof text)) return false;
    while (*at) {
        char* end;
        long first = std::strtol(at, &end, 10), last = first;
        if (end == at) return false;
        if (*end == '-') last = std::strtol(at = end + 1, &end, 10);
        if (end == at || (*end && *end != ',') || first < 0 || last < first || last >= kMaxNumber) return false;
        for (long i = first; i <= last; ++i) take(int(i));
        at = *end ? end + 1 : end;
    }
    return true;
}

// False where its file is none or wrong.
bool read_cores(Node& node, const cpu_set_t& usable) {
    char path[64];
    std::snprintf(path, sizeof path, "/sys/devices/system/node/node%d/cpulist", node.id);
    CPU_ZERO(&node.cores);
    return read_list(path, [&](int core) {
        if (core < CPU_SETSIZE && CPU_ISSET(core, &usable)) CPU_SET(core, &node.cores);
    });
}

// Empty where the system's word is not to be relied on.
std::vector<Node> read_nodes(const cpu_set_t& usable) {
    std::vector<Node> online, with_cores;
    if (!read_list("/sys/devices/system/node/online", [&](int id) { online.emplace_back().id = id; })) return {};
    cpu_set_t covered;
    CPU_ZERO(&covered);
    for (Node& node : online) {
        if (node.id >= kMaxIds || !read_cores(node, usable)) return {};
        if (CPU_COUNT(&node.cores)) with_cores.push_back(node);  // others are memory alone, or not for this process
        CPU_OR(&covered, &covered, &node.cores);
    }
    if (!CPU_EQUAL(&covered, &usable) || with_cores.size() > kMaxNodes) return {};
    return with_cores;
}

// What the rule of one control group is worth, of version 2 or 1, rounded up; kNoLimit where there is none ("max", or -1).
long long group_cores(const std::string& folder) {
    long long quota = 0, period = 0;
    if (std::ifstream rule(folder + "/cpu.max"); !(rule >> quota >> period)) {
        std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;
        std::ifstream(folder + "/cpu.cfs_period_us") >> period;
    }
    return quota > 0 && period > 0 ? 1 + (quota - 1) / period : kNoLimit;
}

// Of a group and of all that it is in. In a container the path may be the machine's, of which nothing is seen there: then the
// uppermost is its own.
long long cores_up_from(const std::string& mount, std::string path) {
    long long cores = group_cores(mount);
    for (; !path.empty(); path.resize(path.rfind('/'))) cores = std::min(cores, group_cores(mount + path));
    return cores;
}

long long allowed_cores(const std::string& root) {
    std::string mount = root + "/sys/fs/cgroup", unified, of_cpu;
    std::ifstream groups(root + "/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {  // number:controllers:path, without controllers in version 2
        size_t first = line.find(':'), path = line.find(":/", first + 1);
        if (path == std::string::npos) continue;
        std::string controllers = "," + line.substr(first + 1, path - first - 1) + ",";
        if (controllers == ",,") unified = line.substr(path + 1);
        if (controllers.find(",cpu,") != std::string::npos) of_cpu = line.substr(path + 1);
    }
    return std::min(cores_up_from(mount, unified), cores_up_from(mount + "/cpu", of_cpu));
}

// The system moves a huge page as a whole. Those with a border in them are split, so that small experts are on the node
// that reads them. Borders at 2 MiB would have nodes read 40 % of V2-Lite's 4-bit experts from others, and a tenth of V3's.
void split_huge_page(uintptr_t border, uintptr_t page) {
    constexpr uintptr_t huge = uintptr_t(2) << 20;
    constexpr int cold = 20;  // MADV_COLD: a hint that a page is not needed soon, for which it must be one of its own
    if (border % huge) madvise(reinterpret_cast<void*>(page), page_bytes(), cold);
}

}  // namespace

int usable_cores(const std::string& root) {
    cpu_set_t set;
    int cores = int(std::thread::hardware_concurrency());
    if (sched_getaffinity(0, sizeof set, &set) == 0) cores = CPU_COUNT(&set);
    return int(std::min<long long>(std::max(cores, 1), allowed_cores(root)));
}

std::vector<Node> usable_nodes() {
    Node all;
    CPU_ZERO(&all.cores);
    if (sched_getaffinity(0, sizeof all.cores, &all.cores) != 0) return {all};
    auto nodes = read_nodes(all.cores);
    return nodes.empty() ? std::vector<Node>{all} : nodes;
}

void stay_on(const Node& node) { sched_setaffinity(0, sizeof node.cores, &node.cores); }

uintptr_t page_bytes() { return uintptr_t(sysconf(_SC_PAGESIZE)); }

void move_to_node(uintptr_t from, uintptr_t to, const Node& node) {
    if (from >= to) return;
    constexpr int bits = 8 * sizeof(unsigned long);
    unsigned long mask[kMaxIds / bits] = {};
    mask[node.id / bits] = 1ul << node.id % bits;
    split_huge_page(from, from);
    split_huge_page(to, to - page_bytes());
    // Preferred, not bound: what does not fit a full node may go to another.
    syscall(SYS_mbind, from, to - from, long(MPOL_PREFERRED), mask, long(kMaxIds + 1), long(MPOL_MF_MOVE));
}

void forget_nodes(uintptr_t from, uintptr_t to) {
    if (from < to) syscall(SYS_mbind, from, to - from, long(MPOL_DEFAULT), nullptr, 0l, 0l);
}

}  // namespace cpu_experts
