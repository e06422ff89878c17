// Preloaded, it makes the system one that refuses tile registers to whoever asks for them.
#include <dlfcn.h>
#include <sys/syscall.h>

#include <cerrno>

// Not from unistd.h, which declares it with an ellipsis: arguments are passed on as the registers that they are.
extern "C" __attribute__((visibility("default"))) long syscall(long number, long a, long b, long c, long d, long e, long f) {
    constexpr long request_permission = 0x1023;
#ifdef SYS_arch_prctl
    if (number == SYS_arch_prctl && a == request_permission) {
        errno = EPERM;
        return -1;
    }
#endif
    using Syscall = long (*)(long, long, long, long, long, long, long);
    static const auto next = reinterpret_cast<Syscall>(dlsym(RTLD_NEXT, "syscall"));
    return next(number, a, b, c, d, e, f);
}
