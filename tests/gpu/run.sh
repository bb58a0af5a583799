#!/bin/sh
# Runs the GPU tests of this directory with the libraries next to them. Tests of copies run once for
# each strategy. Then measures (UCM_TEST_BENCH=no: does not). Exit status: 0 when all tests passed.
here=$(cd "$(dirname "$0")" && pwd)
LD_LIBRARY_PATH=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH
status=0
for test in "$here"/test_*; do
    case $test in
    */test_copy | */test_faults) strategies='sm dma staged auto auto+ring' ;;
    */test_serve) strategies='auto staged auto+ring dma+ring' ;;
    *) strategies=auto ;;
    esac
    for strategy in $strategies; do
        echo "== $(basename "$test") $strategy"
        UCM_TEST_STRATEGY=$strategy timeout "${TEST_SECONDS:-100}" "$test" || status=1
    done
done
echo '== test_copy dma, as with a driver before CUDA 13'
UCM_TEST_NO_BATCHES=1 UCM_TEST_STRATEGY=dma timeout "${TEST_SECONDS:-100}" "$here/test_copy" || status=1

# Python has libraries of its own, so only the daemon is to find those next to this script.
mkdir -p "$here/bin"
for program in ucmd ucmctl; do
    printf '#!/bin/sh\nLD_LIBRARY_PATH=%s exec %s "$@"\n' "'$LD_LIBRARY_PATH'" "'$here/$program'" >"$here/bin/$program"
    chmod +x "$here/bin/$program"
done
python() {
    env -u LD_LIBRARY_PATH -u UCMCLIENT_LIB -u UCMCLIENT_CUDA_LIB UCMD="$here/bin/ucmd" UCMCTL="$here/bin/ucmctl" PYTHONHASHSEED=0 UCM_VLLM_GPU=1 \
        UCM_TEST_CUDA=required UCM_ENCODING_KERNELS="$here/encoding_kernels.so" UCM_COPY_AGENTS="$here/copy_agents.so" python3 -B "$@"
}
if python -c 'import numpy, torch; assert torch.cuda.is_available()' 2>/dev/null; then
    for test in connector trouble copy_agent; do
        echo "== the vLLM connector, test_vllm_$test"
        python "$here/python/tests/integration/test_vllm_$test.py" || status=1
    done
    for test in sparse decode; do
        echo "== ucmclient.$test.cuda, test_${test}_cuda"
        python "$here/python/tests/integration/test_${test}_cuda.py" || status=1
    done
    echo '== loads that re-rotate K, through a daemon and a copy agent'
    python "$here/python/tests/gpu/shifted.py" || status=1
    echo '== plug-ins that get addresses of GPU memory: UCM, TensorRT-LLM'
    python "$here/python/tests/gpu/plugins_torch.py" || status=1
    echo '== GpuDecoder and a daemon, test_decode_gpu'
    python "$here/python/tests/integration/test_decode_gpu.py" || status=1
else
    echo '== the vLLM connector, ucmclient.sparse.cuda and decode.cuda: skipped, python3 has no torch with CUDA, or no numpy'
fi

if python -c 'import msgpack' 2>/dev/null; then
    echo '== thieves and altered handles'
    python "$here/python/tests/gpu/theft.py" || status=1
    for way in straight ring; do
        for test in test_encoding test_encoding_life test_encoding_hostile test_forms; do
            echo "== encoded blocks on a GPU, $way, $test"
            UCM_ENCODING_GPU=$way python "$here/python/tests/integration/$test.py" || status=1
        done
    done
else
    echo '== thieves, altered handles and encoded blocks on a GPU: skipped, python3 has no msgpack'
fi

if [ "$(id -u)" = 0 ] && unshare --pid --fork --mount-proc --ipc --net --uts --user --map-root-user true 2>/dev/null; then
    echo '== isolation: namespaces, users, containers, the sandbox of the unit'
    UCM_BUNDLE=$here python "$here/python/tests/gpu/isolation.py" || status=1
else
    echo '== isolation: skipped, namespaces need root'
fi

if [ "${UCM_TEST_BENCH:-yes}" != no ]; then
    echo '== ucm-bench copy'
    "$here/ucm-bench" copy --ucmd "$here/ucmd" --nvme-dir "${BENCH_DIR:-/var/tmp}" || status=1
fi
exit $status
