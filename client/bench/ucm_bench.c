#include "client/bench/bench.h"

int main(int argc, char **argv)
{
    return program_main(&bench_program, argc, argv, NULL);
}
