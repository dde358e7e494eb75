"""The kernel on a device. ``python tests/gpu/run.py`` builds, runs and measures everything here.

``test_kernel.py`` and ``test_serving.py`` also run on the host build of the kernel, where there is no GPU;
``test_cuda.py`` holds what only a GPU can show. Needs torch and pytest alone.
"""
