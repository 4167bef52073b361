from deepspeed.launcher.runner import main

main()
