// A kernel with all that it needs to run on a CPU: SOURCE is its file, ENTRY its name.
#include SOURCE

#include "emulator/launch.hpp"
