// Preloaded, it makes the machine one of the NUMA nodes that the files in the folder CPU_EXPERTS_FAKE_NODES tell of, and keeps a
// list there of what is moved to which of them, in `moved`.
#include <dlfcn.h>
#include <linux/mempolicy.h>
#include <sys/syscall.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

const char real[] = "/sys/devices/system/node/";

template <class Function>
Function* next(const char* name) {
    return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

void in_folder(char (&path)[4096], const char* name) {
    std::snprintf(path, sizeof path, "%s/%s", std::getenv("CPU_EXPERTS_FAKE_NODES"), name);
}

void note(unsigned long from, unsigned long bytes, const unsigned long* mask) {
    char path[4096];
    in_folder(path, "moved");
    FILE* file = next<FILE*(const char*, const char*)>("fopen")(path, "a");
    if (!file) return;
    for (int word = 0; word < 16; ++word) {
        if (mask[word]) std::fprintf(file, "%lu %lu %d\n", from, from + bytes, word * 64 + __builtin_ctzl(mask[word]));
    }
    std::fclose(file);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) FILE* fopen(const char* path, const char* mode) {
    char fake[4096];
    bool taken = std::strncmp(path, real, sizeof real - 1) == 0;
    if (taken) in_folder(fake, path + sizeof real - 1);
    return next<FILE*(const char*, const char*)>("fopen")(taken ? fake : path, mode);
}

// Not from unistd.h, which declares it with an ellipsis: arguments are passed on as the registers that they are.
extern "C" __attribute__((visibility("default"))) long syscall(long number, long a, long b, long c, long d, long e, long f) {
    if (number == SYS_mbind && c == MPOL_PREFERRED && d) {  // not OpenBLAS, which has it without nodes
        note(static_cast<unsigned long>(a), static_cast<unsigned long>(b), reinterpret_cast<const unsigned long*>(d));
    }
    return next<long(long, long, long, long, long, long, long)>("syscall")(number, a, b, c, d, e, f);
}
