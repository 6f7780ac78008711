# The program long_context: what it refuses, with which words, and one short run with everything exact.
# cmake -DPROGRAM=... -DMODEL=... -DWORK=... -P long_context_cli_test.cmake

file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})

# Exit code 2 and one line on stderr that matches `pattern`.
function(refuses name pattern)
    execute_process(COMMAND ${PROGRAM} --quiet --threads 1 ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE out ERROR_VARIABLE err)
    string(REGEX MATCHALL "\n" lines "${err}")
    list(LENGTH lines count)
    if(NOT code EQUAL 2 OR NOT count EQUAL 1 OR NOT err MATCHES "^long_context: " OR NOT err MATCHES "${pattern}")
        message(SEND_ERROR "${name}: expected exit code 2 and one line with '${pattern}'; got ${code} and:\n${err}")
    endif()
endfunction()

file(WRITE ${WORK}/empty.txt "")
file(WRITE ${WORK}/blank.txt " \n\t\n")
file(WRITE ${WORK}/short.txt "The lighthouse keeper is called Marta. She paints the railing every spring, in green, and feeds the gulls although the harbour office forbids it.\n")
file(WRITE ${WORK}/latin1.txt "The lighthouse keeper is called Marta. Caf")
execute_process(COMMAND printf "\\351 au lait is what she drinks.\\n" OUTPUT_FILE ${WORK}/tail.txt)
execute_process(COMMAND cat ${WORK}/latin1.txt ${WORK}/tail.txt OUTPUT_FILE ${WORK}/foreign.txt)
file(WRITE ${WORK}/letter.gguf "A letter, not a model.\n")
execute_process(COMMAND head -c 1000000 ${MODEL} OUTPUT_FILE ${WORK}/cut.gguf)
set(short --document ${WORK}/short.txt)
set(asking ${short} --question "What is the keeper called?|Marta")

refuses("unknown flag" "--colour" --colour red)
refuses("not a number" "--threads" --threads many)
refuses("unknown preset" "--preset takes one of" --preset quick)
refuses("unknown segmenter" "--segmenter takes one of" --segmenter words)
refuses("sketch bits" "--sketch-bits takes two whole numbers" --sketch-bits 80)
refuses("tau" "tau must be above 0" --tau 0)
refuses("window" "window must be 1 to" --recent 0)
refuses("max tokens" "--max-tokens must be at least 1" --max-tokens 0)
refuses("budget" "--device-budget takes bytes" --device-budget lots)
refuses("negative budget" "--device-budget takes bytes" --device-budget=-5)
refuses("router without its preset" "--router goes with --preset paper" --router w.safetensors)
refuses("trace without its preset" "--trace-zooms goes with --preset progressive" --preset paper --trace-zooms z.bin)
refuses("nothing to do" "nothing to do" ${short})

refuses("missing document" "document '.*nowhere.txt' doesn't exist" --document ${WORK}/nowhere.txt --question q)
refuses("directory" "is a directory" --document ${WORK} --question q)
refuses("empty document" "document '.*empty.txt' is empty" --document ${WORK}/empty.txt --question q)
refuses("blank document" "document '.*blank.txt' is empty" --document ${WORK}/blank.txt --question q)
refuses("missing continuation" "continuation '.*nowhere.txt' doesn't exist" ${short} --teacher-forced ${WORK}/nowhere.txt)

refuses("missing model" "doesn't exist" ${asking} --model ${WORK}/nowhere.gguf)
refuses("foreign model" "isn't a GGUF" ${asking} --model ${WORK}/letter.gguf)
refuses("model cut short" "cut short" ${asking} --model ${WORK}/cut.gguf)

set(quick --quantised-weights --no-self-test --model ${MODEL})
refuses("context of the model" "trained with" ${asking} ${quick} --context 1000000)
refuses("document too long" "[0-9]+ tokens, and the model's context holds 64" ${asking} ${quick} --context 64)
refuses("budget below the line cache" "budget of 102400 bytes" ${asking} ${quick} --device-budget 100K)
refuses("trace that can't be written" "can't be written" ${asking} ${quick} --trace-zooms ${WORK}/nowhere/z.bin)
refuses("missing calibration" "nowhere.safetensors" ${asking} ${quick} --calibration ${WORK}/nowhere.safetensors)

execute_process(COMMAND ${PROGRAM} --help RESULT_VARIABLE code OUTPUT_VARIABLE out ERROR_VARIABLE err)
if(NOT code EQUAL 0 OR NOT out MATCHES "--device-budget" OR NOT err STREQUAL "")
    message(SEND_ERROR "--help: exit code ${code}, ${err}")
endif()

# A text that isn't UTF-8, everything exact: the answer is the full cache's.
execute_process(
    COMMAND ${PROGRAM} --quiet --threads 1 --model ${MODEL} --document ${WORK}/foreign.txt --question "What is the keeper called?|Marta" --teacher-forced ${WORK}/short.txt
            --max-tokens 8 --context 512 --kv-type f32 --device-budget 1G --json ${WORK}/out.json --write-calibration ${WORK}/moments.safetensors
    RESULT_VARIABLE code OUTPUT_VARIABLE out ERROR_VARIABLE err)
if(NOT code EQUAL 0 OR NOT err STREQUAL "")
    message(FATAL_ERROR "A short run: exit code ${code}\n${err}\n${out}")
endif()
file(READ ${WORK}/out.json json)
string(JSON agree GET "${json}" answer_summary agree)
string(JSON kl GET "${json}" continuation kl)
string(JSON sealed GET "${json}" sealed_tokens)
if(NOT agree EQUAL 1 OR NOT sealed EQUAL 0 OR NOT kl LESS 1e-7)
    message(SEND_ERROR "With everything exact: ${agree} of 1 answers agree, ${sealed} tokens sealed, KL ${kl}\n${out}")
endif()
execute_process(COMMAND ${PROGRAM} ${asking} ${quick} --quiet --threads 1 --max-tokens 4 --context 512 --device-budget 1G --calibration ${WORK}/moments.safetensors RESULT_VARIABLE code OUTPUT_QUIET ERROR_VARIABLE err)
if(NOT code EQUAL 0)
    message(SEND_ERROR "A run with the moments that the one before wrote: exit code ${code}\n${err}")
endif()
