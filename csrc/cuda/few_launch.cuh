// Few rows of x.
#pragma once

#include "dot_launch.cuh"
#include "skinny_launch.cuh"
