from prefillcli.cli import main

main()
