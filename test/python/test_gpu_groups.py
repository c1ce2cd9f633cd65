"""GPUs that sum in groups, on the tests' driver: init() finds each rank's GPU by the context of the thread that calls it."""

import textwrap

import jobs


def test_the_context_of_the_calling_thread_names_the_gpu():
    status, output = jobs.run(2, 0, ["-c", textwrap.dedent("""
        import ctypes, os, jobs
        driver = ctypes.CDLL(str(jobs.BUILD / "meson" / "test" / "device" / "libcuda.so.1"))
        import tally
        context = ctypes.c_void_p()
        assert driver.cuInit(0) == 0
        assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), int(os.environ["RANK"])) == 0
        driver.cuCtxPushCurrent_v2.argtypes = (ctypes.c_void_p,)
        assert driver.cuCtxPushCurrent_v2(context) == 0
        tally.init()
        tally.shutdown()
    """)], env={"FAKE_CUDA": "gpus=2 peers=0:1", "TALLY_GPU_GROUP": "2"})
    assert status == 0 and "GPUs in groups" in output, output


def test_a_thread_without_a_context():
    status, output = jobs.run(2, 0, ["-c", textwrap.dedent("""
        import ctypes, jobs
        driver = ctypes.CDLL(str(jobs.BUILD / "meson" / "test" / "device" / "libcuda.so.1"))
        import tally
        assert driver.cuInit(0) == 0
        tally.init()
        tally.shutdown()
    """)], env={"FAKE_CUDA": "gpus=2 peers=0:1", "TALLY_GPU_GROUP": "2"})
    assert status == 0 and "the host sums: rank 0: CUDA: cuCtxGetDevice failed" in output, output
