// Prints how many cores there are for a process that finds the system's files below the argument.
#include <cstdio>

#include "topology.h"

int main(int argc, char** argv) { std::printf("%d\n", cpu_experts::usable_cores(argc > 1 ? argv[1] : "")); }
